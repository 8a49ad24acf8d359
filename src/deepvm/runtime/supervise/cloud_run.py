"""``deepvm run`` in a cloud: start the plan's machines there, supervise them from this host, and end them.

The hub, the ledger and the checkpoints are on the on-demand machine; this host only knows the machines' states. Lost
machines are replaced by the cloud's own fleet (EC2), or requested again from this host (SkyPilot).
"""

from __future__ import annotations

import dataclasses
import math
import time
import typing
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from deepvm.errors import DeepvmError, UnknownName, UsageError
from deepvm.events import Event
from deepvm.protocol.credentials import read_token
from deepvm.runtime.backends.base import Backend
from deepvm.runtime.backends.local.network import sweep
from deepvm.runtime.cluster import Cluster, cluster_of
from deepvm.runtime.ledger.ledger import Ledger
from deepvm.runtime.ledger.sqlite_file import LedgerError, being_written
from deepvm.runtime.run_spec import RunSpec
from deepvm.runtime.supervise.cloud_supervisor import CloudSupervisor, Show
from deepvm.runtime.supervise.local_run import STATES_IN_MEMORY
from deepvm.runtime.supervise.run_folder import RunFolder

HUB_PORT = 7071
LEAVES_S = 30.0  # what who follows a run may take to see that another process ends it


def parse_options(kind: type[Any], words: Sequence[str]) -> Any:
    """Read ``NAME=VALUE`` words as a cloud's settings."""
    known = {field.name: field for field in dataclasses.fields(kind)}
    types = typing.get_type_hints(kind)
    given: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        name = name.strip().replace("-", "_")
        if not equals:
            raise UsageError(f"{word!r} is no setting: write it like --set region=us-east-1")
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
            raise UsageError(f"{name} is {text!r}: a {'whole ' if each is int else ''}number is wanted")
    return Path(text) if Path in wanted else text


def open_backend(on: str, spec: RunSpec, cluster: Cluster, options: Sequence[str]) -> Backend:
    if on == "ec2":
        from deepvm.runtime.backends.ec2.backend import Ec2Backend, Ec2Settings

        return Ec2Backend(spec, cluster, parse_options(Ec2Settings, options))
    from deepvm.runtime.backends.skypilot.backend import SkyPilotBackend, SkyPilotSettings

    return SkyPilotBackend(spec, cluster, parse_options(SkyPilotSettings, options))


def rehearse(on: str, spec: RunSpec, cluster: Cluster, options: Sequence[str], show: Show) -> None:
    """Show every call, or every task file, and change nothing."""
    if on == "ec2":
        from deepvm.runtime.backends.ec2.backend import Ec2Backend, Ec2Settings

        Ec2Backend(spec, cluster, parse_options(Ec2Settings, options), dry_run=True, show=show).up(cluster.machines)
        return
    from deepvm.runtime.backends.skypilot.tasks import SkyPilotSettings, task_files

    for name, text in task_files(cluster, spec, parse_options(SkyPilotSettings, options)).items():
        show(f"# {name}\n{text}")


def run_cloud(
    on: str,
    cluster: Cluster,
    spec: RunSpec,
    *,
    name: str | None,
    options: Sequence[str],
    dry_run: bool,
    show: Show,
) -> str:
    """Request the machines, and supervise them until interrupted; they continue without us. Return the run's name."""
    spec.check()
    if spec.preempt or spec.isolate or spec.workers is not None:
        raise UsageError("--preempt, --isolate and --workers are for machines played here: leave them out of a cloud")
    if spec.module:
        raise UsageError(f"-m {spec.script}: machines of a cloud get a script, not a module; write -- train.py")
    run = name or spec.new_name()
    kept = {"plan": cluster.plan, "settings": spec.to_settings(), "on": on, "options": list(options)}
    folder = RunFolder.create(run, kept)
    begun = False
    try:
        started = _started(spec, folder, cluster)
        if dry_run:
            rehearse(on, started, cluster, options, show)
            return run
        backend = open_backend(on, started, cluster, options)
        with Ledger.create(folder.ledger, run=run, cluster=cluster) as ledger:
            ledger.append([Event.now("run-started", resumed=False, script=spec.script)])
            following = CloudSupervisor(cluster, backend, ledger, show=show, over=_ending(folder).exists)
            show(
                f"run {run}: {len(cluster.machines)} machines are asked for on {on}; they cost "
                f"${cluster.hourly_usd:.4f}/h until deepvm run --down {run}"
            )
            _begin(following, backend, run)
            begun = True
            _follow(following, run)
    except _LeftOver as error:
        begun = True
        raise DeepvmError(str(error)) from None
    except KeyboardInterrupt:
        begun = not dry_run
        raise
    finally:
        if not begun:
            folder.remove()
    return run


class _LeftOver(DeepvmError):
    """A start that failed, and whose machines could not be ended."""


def _begin(following: CloudSupervisor, backend: Backend, run: str) -> None:
    """Request all machines. If that fails, end those that would cost money."""
    try:
        following.begin()
    except DeepvmError as error:
        try:
            backend.down()
        except DeepvmError as left:
            raise _LeftOver(f"{error}; then {left}, or try deepvm run --down {run}") from None
        raise


def _follow(following: CloudSupervisor, run: str) -> None:
    try:
        following.follow()
    except DeepvmError as error:
        hint = "" if "--down" in str(error) else f": its machines cost money until deepvm run --down {run}"
        raise DeepvmError(f"{error}{hint}") from None


def end(name: str) -> list[str] | None:
    """End all machines of a run in a cloud and return None; its folder on this host stays, for reports.

    For a run on this host, return the names of networks that killed runs left, after removing them."""
    folder = RunFolder.find(name)
    found = folder.settings()
    if found["on"] == "local":
        if folder.ledger.exists() and being_written(folder.ledger):
            raise UsageError(f"run {name} is one of this machine, and is running: Ctrl-C ends it")
        return sweep()
    spec = RunSpec.from_settings(found["settings"])
    cluster = cluster_of(found["plan"], folder.path, rank=spec.rank)
    _send_away(folder)
    if found["on"] == "ec2":
        from deepvm.runtime.backends.ec2.backend import Ec2Backend, Ec2Settings
        from deepvm.runtime.backends.ec2.placement import region_of

        cloud = parse_options(Ec2Settings, found["options"])
        Ec2Backend.find(folder.name, region_of(cloud, cluster), settings=cloud).down()
    else:
        open_backend(found["on"], _started(spec, folder, cluster), cluster, found["options"]).down()
    _close(folder)
    return None


def _ending(folder: RunFolder) -> Path:
    """Return the file that marks a run as ending, so that its supervisor does not replace machines."""
    return folder.path / "ending"


def _send_away(folder: RunFolder) -> None:
    _ending(folder).touch(mode=0o600)
    deadline_s = time.monotonic() + LEAVES_S
    while folder.ledger.exists() and being_written(folder.ledger) and time.monotonic() < deadline_s:
        time.sleep(0.05)


def _close(folder: RunFolder) -> None:
    """Record in the ledger that the run has ended."""
    if not folder.ledger.exists():
        return  # it was interrupted before anything was asked for
    try:
        with Ledger.open(folder.ledger, write=True) as ledger:
            up: dict[str | None, bool] = {}
            for event in ledger.events():
                if event.kind == "run-ended":
                    return
                if event.kind in ("machine-up", "machine-down"):
                    up[event.machine] = event.kind == "machine-up"
            gone = [name for name, is_up in up.items() if is_up]
            ledger.append(
                [
                    *(Event.now("machine-down", m, why="stopped") for m in gone),
                    Event.now("run-ended", outcome="interrupted", why="ended by deepvm run --down"),
                ]
            )
    except LedgerError as error:
        raise DeepvmError(f"run {folder.name} is ended, but that cannot be written down: {error}") from None


def _started(spec: RunSpec, folder: RunFolder, cluster: Cluster) -> RunSpec:
    if read_token(folder.token_file) is None:
        raise DeepvmError(f"{folder.token_file} has no token")
    return replace(
        spec,
        script=str(Path(spec.script).resolve()),
        run=folder.name,
        folder=folder.path,
        token_file=folder.token_file,
        hub=f"0.0.0.0:{HUB_PORT}",
        planned_world_size=len(cluster.trainers),
        memory_bytes=spec.memory_bytes or int(STATES_IN_MEMORY * (cluster.checkpoint_bytes or 300_000_000)),
    )
