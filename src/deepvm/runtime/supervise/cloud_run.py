"""A plan -> a run in a cloud: starts its machines there, supervises them from this host, and ends them.

The hub, its ledger and the checkpoints are on the on-demand machine; this host only records the machines' states. The
cloud's fleet replaces lost machines (EC2), or this host requests them again (SkyPilot).
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepvm import variables
from deepvm.errors import DeepvmError, UnknownName, UsageError
from deepvm.events import Event
from deepvm.runtime.backends.base import Backend
from deepvm.runtime.backends.local.network import sweep
from deepvm.runtime.cluster import Cluster, cluster_of
from deepvm.runtime.ledger.ledger import Ledger
from deepvm.runtime.ledger.sqlite_file import LedgerError, being_written
from deepvm.runtime.run_spec import RunSpec
from deepvm.runtime.supervise.cloud_supervisor import CloudSupervisor, Show
from deepvm.runtime.supervise.local_run import STATES_IN_MEMORY
from deepvm.runtime.supervise.policies import conduct_facts, losses_per_h, replicas_of, with_hazard
from deepvm.runtime.supervise.replan import Replanner
from deepvm.runtime.supervise.run_folder import RunFolder

HUB_PORT = 7071
_NO_LAST_MOMENT = (
    "the plan goes on demand at the last moment before its deadline, and deepvm run does that on this machine only: in "
    "a cloud it does not see how many steps are done, so watch the deadline, and start a plan with on-demand machines "
    "in time"
)
STATES = ("machine-up", "machine-down", "run-ended")
SUPERVISOR_ENDS_S = 30.0  # for the supervisor to detect that another process ends the run


def parse_options(kind: type[Any], words: Sequence[str]) -> Any:
    """Read ``NAME=VALUE`` words as a cloud's settings."""
    known = {field.name: field for field in dataclasses.fields(kind)}
    types = typing.get_type_hints(kind)
    given: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        name = name.strip().replace("-", "_")
        if not equals:
            raise UsageError(f"{word!r} is not a valid setting: write it like --set region=us-east-1")
        if name not in known:
            raise UnknownName("setting", name, known)
        given[name] = _value(name, value, types[name])
    return kind(**given)


def _value(name: str, text: str, kind: Any) -> Any:
    wanted = [each for each in typing.get_args(kind) or (kind,) if each is not type(None)]
    if typing.get_origin(kind) is tuple:
        return tuple(part for part in text.split(",") if part)
    for each in (int, float):
        if each in wanted:
            try:
                number = each(text)
            except ValueError:
                number = math.nan
            if math.isfinite(number):
                return number
            raise UsageError(f"{name} is {text!r}: it must be a {'whole ' if each is int else ''}number")
    return Path(text) if Path in wanted else text


def open_backend(on: str, spec: RunSpec, cluster: Cluster, options: Sequence[str], **more: Any) -> Backend:
    """Return the backend of a cloud; ``more`` are parameters of ``Ec2Backend``."""
    if on == "ec2":
        from deepvm.runtime.backends.ec2.backend import Ec2Backend, Ec2Settings

        return Ec2Backend(spec, cluster, parse_options(Ec2Settings, options), **more)
    from deepvm.runtime.backends.skypilot.backend import SkyPilotBackend, SkyPilotSettings

    return SkyPilotBackend(spec, cluster, parse_options(SkyPilotSettings, options))


def rehearse(on: str, spec: RunSpec, cluster: Cluster, options: Sequence[str], show: Show) -> None:
    """Show every call, or every task file, and change nothing."""
    if on == "ec2":
        open_backend(on, spec, cluster, options, dry_run=True, show=show).up(cluster.machines)
        return
    from deepvm.runtime.backends.skypilot.tasks import SkyPilotSettings, task_files

    for name, text in task_files(cluster, spec, parse_options(SkyPilotSettings, options)).items():
        show(f"# {name}\n{text}")


def run_cloud(
    on: str, cluster: Cluster, spec: RunSpec, run: str, *, options: Sequence[str], dry_run: bool, show: Show
) -> None:
    """Request the machines, and supervise them until interrupted; they continue without this process."""
    spec.check()
    if spec.preempt or spec.seed or spec.isolate or spec.workers is not None or spec.steps is not None:
        names = "--preempt, --seed, --isolate, --workers and --steps"
        raise UsageError(f"{names} are for --on local: leave them out in a cloud")
    if spec.module:
        raise UsageError(f"-m {spec.script}: machines of a cloud get a script, not a module; write -- train.py")
    if cluster.conduct is not None and cluster.conduct.fallback != "none":
        cluster = dataclasses.replace(cluster, notes=(*cluster.notes, _NO_LAST_MOMENT))
        show(_NO_LAST_MOMENT)
    kept = {"plan": cluster.plan, "settings": spec.to_settings(), "on": on, "options": list(options)}
    folder = RunFolder.create(run, kept)
    machines_exist = False
    try:
        started = _started(spec, folder, cluster)
        if dry_run:
            rehearse(on, started, cluster, options, show)
            return
        backend = open_backend(on, started, cluster, options)
        with Ledger.create(folder.ledger, run=run, cluster=cluster) as ledger:
            conduct = conduct_facts(spec, cluster)
            ledger.append([Event.now("run-started", resumed=False, script=spec.script, conduct=conduct)])
            supervisor = CloudSupervisor(
                cluster, backend, ledger, show=show, ended=_ending(folder).exists,
                replanner=Replanner(threshold=spec.replan_threshold),
            )  # fmt: skip
            show(
                f"run {run}: {len(cluster.machines)} machines are requested on {on}; they cost "
                f"${cluster.hourly_usd:.4f}/h until deepvm run --down {run}"
            )
            machines_exist = True
            try:
                supervisor.begin()
            except DeepvmError as error:
                _end_all(backend, error, run)
                machines_exist = False
                raise
            _follow(supervisor, run)
    finally:
        if not machines_exist:
            folder.remove()


def _end_all(backend: Backend, error: DeepvmError, run: str) -> None:
    """End the machines of a run that could not be started, which would cost money."""
    try:
        backend.down()
    except DeepvmError as left:
        raise DeepvmError(f"{error}; then {left}, or try deepvm run --down {run}") from None


def _follow(supervisor: CloudSupervisor, run: str) -> None:
    try:
        supervisor.follow()
    except DeepvmError as error:
        hint = "" if "--down" in str(error) else f": its machines cost money until deepvm run --down {run}"
        raise DeepvmError(f"{error}{hint}") from None


def end(name: str) -> list[str] | None:
    """End all machines of a run in a cloud and return None; its folder on this host stays, for reports.

    For a run on this host, return the names of networks that killed runs left, after removing them."""
    folder = RunFolder.find(name)
    if folder.backend_name == "local":
        if folder.ledger.exists() and being_written(folder.ledger):
            raise UsageError(f"run {name} is running on this machine: end it with Ctrl-C")
        return sweep()
    found = folder.checked_settings()
    spec = RunSpec.from_settings(found["settings"])
    cluster = cluster_of(found["plan"], folder.path, rank=spec.rank)
    _end_supervisor(folder)
    if found["on"] == "ec2":
        from deepvm.runtime.backends.ec2.backend import Ec2Backend, Ec2Settings
        from deepvm.runtime.backends.ec2.placement import region_of

        cloud = parse_options(Ec2Settings, found["options"])
        Ec2Backend.find(folder.name, region_of(cloud, cluster), settings=cloud).down()
    else:
        open_backend(found["on"], _started(spec, folder, cluster), cluster, found["options"]).down()
    _record_end(folder)
    return None


def _ending(folder: RunFolder) -> Path:
    """Return the file that marks a run as ending, so that its supervisor does not replace machines."""
    return folder.path / "ending"


def _end_supervisor(folder: RunFolder) -> None:
    _ending(folder).touch(mode=0o600)
    deadline_s = time.monotonic() + SUPERVISOR_ENDS_S
    while folder.ledger.exists() and being_written(folder.ledger) and time.monotonic() < deadline_s:
        time.sleep(0.05)


def _record_end(folder: RunFolder) -> None:
    """Record in the ledger that the run has ended."""
    if not folder.ledger.exists():
        return  # it was interrupted before anything was requested
    try:
        with Ledger.open(folder.ledger, write=True) as ledger:
            kinds = {event.machine: event.kind for event in ledger.events() if event.kind in STATES}
            if "run-ended" in kinds.values():
                return
            up = [name for name, kind in kinds.items() if kind == "machine-up"]
            downs = [Event.now("machine-down", name, why="stopped") for name in up]
            ledger.append([*downs, Event.now("run-ended", outcome="interrupted", why="ended by deepvm run --down")])
    except LedgerError as error:
        raise DeepvmError(f"run {folder.name} is ended, but its ledger cannot be written: {error}") from None


def _started(spec: RunSpec, folder: RunFolder, cluster: Cluster) -> RunSpec:
    key = os.environ.get(variables.RUN_KEY)
    return folder.started(
        spec,
        policy=with_hazard(spec.policy, losses_per_h(cluster)),
        replicas=replicas_of(cluster.conduct),
        script=str(Path(spec.script).resolve()),
        hub=f"0.0.0.0:{HUB_PORT}",
        planned_world_size=len(cluster.trainers),
        memory_bytes=spec.memory_bytes or int(STATES_IN_MEMORY * (cluster.checkpoint_bytes or 300_000_000)),
        env={variables.RUN_KEY: key} if key else {},
    )
