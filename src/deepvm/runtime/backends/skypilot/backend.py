"""Machines through SkyPilot: each is a cluster of one node there, so that a lost one is replaced alone."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepvm import variables
from deepvm.errors import DeepvmError, MissingExtra, SourceFailed, UnknownName, UsageError
from deepvm.runtime.backends.base import Change, NoCapacity
from deepvm.runtime.backends.skypilot.tasks import (
    HUB_VARIABLE,
    SkyPilotSettings,
    cluster_name,
    hub_machine,
    task_files,
    task_text,
)
from deepvm.runtime.cluster import Cluster, Machine
from deepvm.runtime.run_spec import RunSpec
from deepvm.store.regular_file import write_private

__all__ = ["SkyPilotBackend", "SkyPilotSettings", "task_files"]

_ENDED = frozenset({"SUCCEEDED", "FAILED", "CANCELLED"})  # of a request to SkyPilot's server

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_MOST_FAILURES = (
    5  # one after the other: a server that starts anew, or a cloud that is slow to answer, is no reason to end
)


@dataclass(kw_only=True, slots=True)
class _Asked:
    machine: Machine
    request: str | None = None  # of its launch; None: it waits for the hub, or for the end of what had its name before
    deadline_s: float = 0.0
    address: str | None = None  # once it is up


@dataclass(kw_only=True, slots=True)
class _StatusQuery:
    """A question for the state of machines, on its way."""

    request: str
    names: frozenset[str] = field(default_factory=frozenset)


class SkyPilotBackend:
    """The hub's machine comes first; the others are launched by ``poll`` when its address is known.

    SkyPilot answers a launch minutes later, so it is the next ``up`` of a machine, after ``poll`` told that it is
    down, which raises what became of the first: NoCapacity, or SourceFailed.
    """

    def __init__(self, spec: RunSpec, cluster: Cluster, settings: SkyPilotSettings | None = None) -> None:
        self._sky = _sdk()
        self._spec, self._cluster, self._settings = spec, cluster, settings or SkyPilotSettings()
        self._hub_name = hub_machine(cluster).name
        self._asked: dict[str, _Asked] = {}
        self._endings: dict[str, str] = {}  # machine -> the request that tears it down
        self._refused: dict[str, DeepvmError] = {}
        self._query: _StatusQuery | None = None
        self._changes: list[Change] = []
        self._next_s = 0.0
        self._failures = 0

    @property
    def hub(self) -> str | None:
        """HOST:PORT of the hub as the machines see it, once its machine is up."""
        asked = self._asked.get(self._hub_name)
        if asked is None or asked.address is None:
            return None
        return f"{asked.address}:{self._spec.hub.rpartition(':')[2]}"

    def up(self, machines: Sequence[Machine]) -> None:
        names = [machine.name for machine in machines]
        for name in names:
            if names.count(name) > 1 or name in self._asked:
                raise UsageError(f"{name} is up or on its way: take it down before it is asked for again")
        if self._hub_name in names and any(asked.request is not None for asked in self._asked.values()):
            raise DeepvmError(
                f"{self._hub_name} is down, and the other machines know no other place to meet: "
                f"end them with deepvm run --down {self._spec.run}"
            )
        for machine in sorted(machines, key=lambda one: one.name != self._hub_name):
            if machine.name in self._refused:
                raise self._refused.pop(machine.name)
            self._asked[machine.name] = _Asked(machine=machine)
        self._launch_ready()

    def poll(self) -> Sequence[Change]:
        if self._asked and time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + self._settings.ask_every_s
            try:
                self._look_around()
                self._failures = 0
            except SourceFailed:
                self._failures += 1
                if self._failures >= _MOST_FAILURES:
                    raise
        changes, self._changes = self._changes, []
        return changes

    def preempt(self, name: str, *, notice_s: float) -> None:  # noqa: ARG002
        raise UsageError(f"{name} cannot be preempted on purpose: SkyPilot has no notices to give, --on local has")

    def down(self, names: Sequence[str] | None = None, *, within_s: float = 10.0) -> None:
        known = dict.fromkeys([*(machine.name for machine in self._cluster.machines), *self._asked])
        for name in names or ():
            if name not in known:
                raise UnknownName("machine", name, known)
        chosen = list(known if names is None else names)
        with contextlib.suppress(SourceFailed):  # to be asked first is a courtesy, the end is not
            self._wait(self._ask_to_stop(chosen), within_s)
        left = {}
        for name in chosen:
            try:
                self._end(name)
            except SourceFailed as error:
                left[name] = str(error)
        self._wait([self._endings[name] for name in chosen if name not in left], self._settings.down_within_s)
        left.update(self._not_gone(name for name in chosen if name not in left))
        for name in chosen:
            if name not in left and name in self._asked:
                del self._asked[name]
                self._changes.append(Change(machine=name, state="down", why="stopped", at_s=time.time()))
        if left:
            commands = " ".join(self._name(name) for name in left)
            why = "; ".join(f"{name}: {reason}" for name, reason in left.items())
            raise SourceFailed(
                f"machines may still run and cost money ({why}): look with sky status, end with sky down {commands}"
            )

    def _ask_to_stop(self, names: Iterable[str]) -> list[str]:
        asked = {name: self._asked[name] for name in names if name in self._asked}
        launches = [one.request for one in asked.values() if one.address is None and one.request]
        running = [self._name(name) for name, one in asked.items() if one.address is not None]
        requests = [self._ask(self._sky.cancel, name, all=True) for name in running]
        return requests + ([self._ask(self._sky.api_cancel, launches)] if launches else [])

    def _look_around(self) -> None:
        launches = {asked.request for asked in self._asked.values() if asked.address is None and asked.request}
        queries = {self._query.request} if self._query is not None else set()
        ended = self._ended({*launches, *queries, *self._endings.values()})
        self._endings = {name: request for name, request in self._endings.items() if request not in ended}
        for name, asked in list(self._asked.items()):
            if asked.address is None and asked.request is not None:
                self._arrival(name, asked, ended)
        self._check_status(ended)
        self._launch_ready()

    def _launch_ready(self) -> None:
        for name, asked in self._asked.items():
            if asked.request is None and name not in self._endings and (name == self._hub_name or self.hub):
                asked.request = self._launch(asked.machine)
                asked.deadline_s = time.monotonic() + self._settings.launch_within_s

    def _launch(self, machine: Machine) -> str:
        name = self._name(machine.name)
        text = task_text([machine], self._spec, self._settings, hub=self._hub_name, everybody=self._cluster.machines)
        folder = self._spec.folder / "skypilot"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.yaml"
        write_private(path, text)
        token = self._spec.token_file.read_text(encoding="utf-8").strip()
        task = self._ask(self._sky.Task.from_yaml, os.fspath(path))
        task.update_envs({HUB_VARIABLE: self.hub or ""})
        task.update_secrets({variables.TOKEN: token, **self._spec.env})
        return str(self._ask(self._sky.launch, task, cluster_name=name))

    def _arrival(self, name: str, asked: _Asked, ended: set[str]) -> None:
        """What became of a launch."""
        if asked.request not in ended:
            if time.monotonic() < asked.deadline_s:
                return
            self._ask(self._sky.api_cancel, [asked.request])
            within = f"it did not come up within {self._settings.launch_within_s:.0f} s"
            self._lose(name, "failed", NoCapacity(asked.machine, within))
            return
        try:
            _, handle = self._ask(self._sky.get, asked.request)
            asked.address = handle.cached_internal_ips[0]
        except self._sky.exceptions.ResourcesUnavailableError as error:
            self._lose(name, "lost", NoCapacity(asked.machine, _sentence(error)))
        except SourceFailed as error:
            self._lose(name, "failed", error)
        else:
            self._changes.append(Change(machine=name, state="up", at_s=time.time(), address=asked.address))

    def _check_status(self, ended: set[str]) -> None:
        """Lose what SkyPilot says is not up any more, and ask again."""
        if self._query is not None:
            if self._query.request not in ended:
                return
            query, self._query = self._query, None
            records = self._ask(self._sky.get, query.request)
            alive = {record["name"] for record in records if record["status"].value == "UP"}
            for name in query.names & self._asked.keys():
                if self._name(name) not in alive:
                    spot = self._asked[name].machine.market == "spot"
                    self._lose(name, "preempted" if spot else "lost", None)
        names = frozenset(name for name, asked in self._asked.items() if asked.address is not None)
        if names:
            mode = self._sky.StatusRefreshMode.FORCE  # the cloud's word, not what SkyPilot remembers
            request = self._ask(self._sky.status, [self._name(name) for name in sorted(names)], refresh=mode)
            self._query = _StatusQuery(request=str(request), names=names)

    def _lose(self, name: str, why: Any, error: DeepvmError | None) -> None:
        self._end(name)  # a part of it may still be there, and cost money
        del self._asked[name]
        if error is not None:
            self._refused[name] = error
        self._changes.append(Change(machine=name, state="down", why=why, at_s=time.time()))

    def _end(self, name: str) -> None:
        self._endings[name] = str(self._ask(self._sky.down, self._name(name)))

    def _not_gone(self, names: Iterable[str]) -> dict[str, str]:
        """Those whose teardown did not end well, and why."""
        left = {}
        for name in names:
            request = self._endings.pop(name)
            try:
                if self._ended({request}):
                    self._ask(self._sky.get, request)
                else:
                    left[name] = f"not gone after {self._settings.down_within_s:.0f} s"
            except self._sky.exceptions.ClusterDoesNotExist:
                pass  # it was gone already
            except SourceFailed as error:
                left[name] = str(error)
        return left

    def _wait(self, requests: Iterable[str], within_s: float) -> None:
        """Until these requests ended, in whatever way, or the time is up."""
        waited, deadline_s = {str(request) for request in requests}, time.monotonic() + within_s
        while waited and time.monotonic() < deadline_s:
            waited -= self._ended(waited)
            if waited:
                time.sleep(min(0.5, max(0.0, deadline_s - time.monotonic())))

    def _ended(self, requests: set[str]) -> set[str]:
        if not requests:
            return set()
        return {one.request_id for one in self._ask(self._sky.api_status, sorted(requests)) if one.status in _ENDED}

    def _name(self, machine: str) -> str:
        return cluster_name(self._spec.run, machine)

    def _ask(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """SkyPilot talks on stdout, which belongs to the run's own answer."""
        errors = self._sky.exceptions
        with contextlib.redirect_stdout(sys.stderr):
            try:
                return call(*arguments, **options)
            except (errors.ResourcesUnavailableError, errors.ClusterDoesNotExist):
                raise
            except Exception as error:  # SkyPilot's own and its server's, of many families
                raise SourceFailed(f"SkyPilot failed ({call.__name__}): {_sentence(error)}") from error


def _sentence(error: Exception) -> str:
    lines = (line.strip() for line in _COLOURS.sub("", str(error)).splitlines())
    return next((line for line in lines if line), type(error).__name__)[:300]


def _sdk() -> Any:
    with contextlib.redirect_stdout(sys.stderr):  # its loggers keep the stdout that they find
        try:
            import sky
        except ImportError:
            raise MissingExtra("deepvm run --on skypilot", "skypilot") from None
    if not hasattr(sky.Task, "update_secrets"):
        raise UsageError(f"SkyPilot {sky.__version__} keeps no secrets out of its files: pip install 'skypilot>=0.10'")
    return sky
