"""``deepvm run`` in a cloud: bring the plan's machines up there, follow them from here, and end them.

The hub, the ledger and the checkpoints are on the on-demand machine; here only machines are seen, as the cloud tells.
What is lost is replaced by the cloud's own fleet (EC2), or asked for again from here (SkyPilot).
"""

from __future__ import annotations

import dataclasses
import time
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from deepvm.errors import DeepvmError, SourceFailed, UnknownName, UsageError
from deepvm.memnode.access import read_token
from deepvm.runtime.backend import Backend, Change, Job, NoCapacity
from deepvm.runtime.cluster import Cluster, cluster_of
from deepvm.runtime.events import Event
from deepvm.runtime.folder import RunFolder, new_name
from deepvm.runtime.here import Settings
from deepvm.runtime.ledger import Ledger
from deepvm.runtime.replan import Replanner
from deepvm.runtime.supervisor import about

HUB_PORT = 7071
LOOK_S = 10.0
REPLACED = ("preempted", "lost", "failed")
Say = Callable[[str], None]


def parse_options(kind: type[Any], words: Sequence[str]) -> Any:
    """``NAME=VALUE`` words as a cloud's settings."""
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
                return each(text)
            except ValueError:
                raise UsageError(f"{name} is {text!r}: a number is wanted") from None
    return Path(text) if Path in wanted else text


def open_backend(on: str, job: Job, cluster: Cluster, options: Sequence[str]) -> Backend:
    if on == "ec2":
        from deepvm.runtime.ec2 import Ec2Backend, Ec2Settings

        return Ec2Backend(job, cluster, parse_options(Ec2Settings, options))
    from deepvm.runtime.skypilot import SkyPilotBackend, SkyPilotSettings

    return SkyPilotBackend(job, cluster, parse_options(SkyPilotSettings, options))


def rehearse(on: str, job: Job, cluster: Cluster, options: Sequence[str], say: Say) -> None:
    """Say every call, or every task file, and change nothing."""
    if on == "ec2":
        from deepvm.runtime.ec2 import Ec2Backend, Ec2Settings

        Ec2Backend(job, cluster, parse_options(Ec2Settings, options), dry_run=True, say=say).up(cluster.machines)
        return
    from deepvm.runtime.skypilot_tasks import SkyPilotSettings, task_files

    for name, text in task_files(cluster, job, parse_options(SkyPilotSettings, options)).items():
        say(f"# {name}\n{text}")


def start(
    on: str, cluster: Cluster, settings: Settings, *, name: str | None, options: Sequence[str], dry_run: bool, say: Say
) -> str:
    """Ask for the machines, and follow them until interrupted; they go on without us. The run's name."""
    settings.check()
    if settings.preempt or settings.isolate:
        raise UsageError("--preempt and --isolate are for machines played here: leave them out, or use --on local")
    run = name or new_name(settings.script)
    kept = {"plan": cluster.plan, "settings": settings.to_json(), "on": on, "options": list(options)}
    folder = RunFolder.create(run, kept)
    begun = False
    try:
        job = _job(folder, cluster, settings)
        if dry_run:
            rehearse(on, job, cluster, options, say)
            return run
        backend = open_backend(on, job, cluster, options)
        begun = True
    finally:
        if not begun:
            folder.remove()
    with Ledger.create(folder.ledger, run=run, cluster=cluster) as ledger:
        ledger.append([_event("run-started", resumed=False, script=settings.script)])
        say(f"run {run}: its machines cost ${cluster.hourly_usd:.4f}/h until deepvm run --down {run}")
        _Followed(cluster, backend, ledger, say).follow()
    return run


def end(name: str) -> None:
    """End all machines of a run and leave nothing of it behind; its folder here stays, for reports."""
    folder = RunFolder.find(name)
    found = folder.settings()
    if found["on"] == "local":
        raise UsageError(f"run {name} is one of this machine, where nothing outlives deepvm run: Ctrl-C ends it")
    settings = Settings.from_json(found["settings"])
    cluster = cluster_of(found["plan"], folder.path, rank=settings.rank)
    if found["on"] == "ec2":
        from deepvm.runtime.ec2 import Ec2Backend, Ec2Settings
        from deepvm.runtime.ec2_place import region_of

        cloud = parse_options(Ec2Settings, found["options"])
        Ec2Backend.find(folder.name, region_of(cloud, cluster), settings=cloud).down()
    else:
        open_backend(found["on"], _job(folder, cluster, settings), cluster, found["options"]).down()
    with Ledger.open(folder.ledger, write=True) as ledger:
        ledger.append([_event("run-ended", outcome="interrupted", why="ended by deepvm run --down")])


class _Followed:
    def __init__(self, cluster: Cluster, backend: Backend, ledger: Ledger, say: Say) -> None:
        self._cluster, self._backend, self._ledger, self._say = cluster, backend, ledger, say
        self._replanner = Replanner()

    def follow(self) -> None:
        self._backend.up(self._cluster.machines)
        for machine in self._cluster.machines:
            self._tell("machine-asked", machine.name, **about(machine))
        while True:
            time.sleep(LOOK_S)
            try:
                for change in self._backend.poll():
                    self._changed(change)
            except NoCapacity as error:
                self._without(error)
            except SourceFailed as error:  # it may answer later
                self._say(str(error))

    def _changed(self, change: Change) -> None:
        machine = next((m for m in self._cluster.machines if m.name == change.machine), None)
        if machine is None:
            return
        if change.state == "up":
            self._tell("machine-up", machine.name, at_s=change.at_s, **about(machine))
        else:
            self._tell("machine-down", machine.name, at_s=change.at_s, why=change.why)
        self._say(f"{machine.name} is {change.state}{f' ({change.why})' if change.why else ''}")
        if change.state == "down" and change.why in REPLACED:
            try:
                self._backend.up([machine])
            except NoCapacity as error:
                self._without(error)

    def _without(self, error: NoCapacity) -> None:
        found = self._replanner.instead_of(self._cluster, error.machine, str(error))
        if found is None:
            self._say(f"{error}; nothing else fits the budget, so it is waited for")
            return
        self._cluster, changes = found
        self._tell("replanned", error.machine.name, changes=list(changes))
        self._say("; ".join(changes))
        self._backend.up([m for m in self._cluster.machines if m.name == error.machine.name])

    def _tell(self, kind: str, machine: str, *, at_s: float | None = None, **data: Any) -> None:
        self._ledger.append([Event(at_s=at_s or time.time(), kind=kind, machine=machine, data=data)])


def _job(folder: RunFolder, cluster: Cluster, settings: Settings) -> Job:
    if read_token(folder.token_file) is None:
        raise DeepvmError(f"{folder.token_file} has no token")
    return Job(
        run=folder.name,
        script=str(Path(settings.script).resolve()),
        args=settings.args,
        folder=folder.path,
        hub=f"0.0.0.0:{HUB_PORT}",
        token_file=folder.token_file,
        policy=settings.policy,
        after_loss=settings.after_loss,
        batch=settings.batch,
        planned_world_size=len(cluster.trainers),
        memory_bytes=settings.memory_bytes or int(2.2 * (cluster.checkpoint_bytes or 300_000_000)),
        durable=settings.durable,
        max_restarts=settings.max_restarts,
    )


def _event(kind: str, **data: Any) -> Event:
    return Event(at_s=time.time(), kind=kind, data=data)
