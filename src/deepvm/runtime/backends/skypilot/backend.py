"""A run's machines through SkyPilot: each is a cluster of one node there, so that a lost one is replaced alone."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from deepvm import variables
from deepvm.errors import DeepvmError, MissingExtra, SourceFailed, UnknownName, UsageError
from deepvm.protocol.addresses import join_address, split_address
from deepvm.runtime.backends.base import Change, NoCapacity
from deepvm.runtime.backends.skypilot.tasks import (
    HUB_VARIABLE,
    SkyPilotSettings,
    cluster_name,
    task_files,
    task_text,
)
from deepvm.runtime.cluster import Cluster, Machine, hub_of
from deepvm.runtime.run_spec import RunSpec
from deepvm.store.regular_file import write_private

__all__ = ["SkyPilotBackend", "SkyPilotSettings", "task_files"]

_ENDED = frozenset({"SUCCEEDED", "FAILED", "CANCELLED"})  # of a request to SkyPilot's server

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_MOST_FAILURES = 5  # in a row: a server that restarts, or a slow cloud, must not end the run


@dataclass(kw_only=True, slots=True)
class _Launch:
    machine: Machine
    request: str | None = None  # None: it waits for the hub, or for the end of an earlier machine with its name
    deadline_s: float = 0.0
    address: str | None = None  # once it is up


class SkyPilotBackend:
    """The hub's machine is launched first; ``poll`` launches the others when its address is known.

    SkyPilot answers a launch minutes later. If it fails, ``poll`` reports the machine as down, and its next ``up``
    raises the reason: NoCapacity or SourceFailed.
    """

    def __init__(self, spec: RunSpec, cluster: Cluster, settings: SkyPilotSettings | None = None) -> None:
        self._sky = _sdk()
        self._spec, self._cluster, self._settings = spec, cluster, settings or SkyPilotSettings()
        self._hub_name = hub_of(cluster).name
        self._launches: dict[str, _Launch] = {}
        self._endings: dict[str, str] = {}  # machine -> the request that tears it down
        self._refused: dict[str, DeepvmError] = {}
        self._query: tuple[str, frozenset[str]] | None = None  # a status request, and the machines that it asks for
        self._changes: list[Change] = []
        self._next_poll_s = 0.0
        self._failures = 0

    @property
    def hub(self) -> str | None:
        """Return the hub's HOST:PORT for machines, once its machine is up."""
        launch = self._launches.get(self._hub_name)
        if launch is None or launch.address is None:
            return None
        return join_address(launch.address, split_address(self._spec.hub)[1])

    def up(self, machines: Sequence[Machine]) -> None:
        names = [machine.name for machine in machines]
        for name in names:
            if names.count(name) > 1 or name in self._launches:
                raise UsageError(f"{name} is up or requested already: end it before it is requested again")
        if self._hub_name in names and any(launch.request is not None for launch in self._launches.values()):
            raise DeepvmError(
                f"{self._hub_name} is down, and the run's hub with it: "
                f"end the run with deepvm run --down {self._spec.run}"
            )
        for machine in sorted(machines, key=lambda one: one.name != self._hub_name):
            if machine.name in self._refused:
                raise self._refused.pop(machine.name)
            self._launches[machine.name] = _Launch(machine=machine)
        self._launch_ready()

    def poll(self) -> Sequence[Change]:
        if self._launches and time.monotonic() >= self._next_poll_s:
            self._next_poll_s = time.monotonic() + self._settings.ask_every_s
            try:
                self._check_requests()
                self._failures = 0
            except SourceFailed:
                self._failures += 1
                if self._failures >= _MOST_FAILURES:
                    raise
        changes, self._changes = self._changes, []
        return changes

    def preempt(self, name: str, *, notice_s: float) -> None:  # noqa: ARG002
        raise UsageError(f"{name} cannot be preempted: SkyPilot gives no notices; use --on local")

    def down(self, names: Sequence[str] | None = None, *, within_s: float = 10.0) -> None:
        known = dict.fromkeys([*(machine.name for machine in self._cluster.machines), *self._launches])
        for name in names or ():
            if name not in known:
                raise UnknownName("machine", name, known)
        chosen = list(known if names is None else names)
        with contextlib.suppress(SourceFailed):  # machines are torn down in any case
            self._wait(self._request_stop(chosen), within_s)
        left = {}
        for name in chosen:
            try:
                self._end(name)
            except SourceFailed as error:
                left[name] = str(error)
        self._wait([self._endings[name] for name in chosen if name not in left], self._settings.down_within_s)
        left.update(self._not_gone(name for name in chosen if name not in left))
        for name in chosen:
            if name not in left and name in self._launches:
                del self._launches[name]
                self._changes.append(Change(machine=name, state="down", why="stopped", at_s=time.time()))
        if left:
            commands = " ".join(self._name(name) for name in left)
            why = "; ".join(f"{name}: {reason}" for name, reason in left.items())
            raise SourceFailed(
                f"machines may still run and cost money ({why}): check with sky status, end with sky down {commands}"
            )

    def _request_stop(self, names: Iterable[str]) -> list[str]:
        known = {name: self._launches[name] for name in names if name in self._launches}
        pending = [launch.request for launch in known.values() if launch.address is None and launch.request]
        running = [self._name(name) for name, launch in known.items() if launch.address is not None]
        requests = [self._call(self._sky.cancel, name, all=True) for name in running]
        return requests + ([self._call(self._sky.api_cancel, pending)] if pending else [])

    def _check_requests(self) -> None:
        pending = {launch.request for launch in self._launches.values() if launch.address is None and launch.request}
        queries = {self._query[0]} if self._query is not None else set()
        ended = self._ended({*pending, *queries, *self._endings.values()})
        self._endings = {name: request for name, request in self._endings.items() if request not in ended}
        for name, launch in list(self._launches.items()):
            if launch.address is None and launch.request is not None:
                self._check_launch(name, launch, ended)
        self._check_status(ended)
        self._launch_ready()

    def _launch_ready(self) -> None:
        for name, launch in self._launches.items():
            if launch.request is None and name not in self._endings and (name == self._hub_name or self.hub):
                launch.request = self._launch(launch.machine)
                launch.deadline_s = time.monotonic() + self._settings.launch_within_s

    def _launch(self, machine: Machine) -> str:
        name = self._name(machine.name)
        text = task_text([machine], self._spec, self._settings, hub=self._hub_name, all_machines=self._cluster.machines)
        folder = self._spec.folder / "skypilot"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.yaml"
        write_private(path, text)
        token = self._spec.token_file.read_text(encoding="utf-8").strip()
        task = self._call(self._sky.Task.from_yaml, os.fspath(path))
        task.update_envs({HUB_VARIABLE: self.hub or ""})
        task.update_secrets({variables.TOKEN: token, **self._spec.env})
        return str(self._call(self._sky.launch, task, cluster_name=name))

    def _check_launch(self, name: str, launch: _Launch, ended: set[str]) -> None:
        """Report a launch as up or down if it has ended or takes too long."""
        if launch.request not in ended:
            if time.monotonic() < launch.deadline_s:
                return
            self._call(self._sky.api_cancel, [launch.request])
            within = f"it did not come up within {self._settings.launch_within_s:.0f} s"
            self._lose(name, "failed", NoCapacity(launch.machine, within))
            return
        try:
            _, handle = self._call(self._sky.get, launch.request)
            launch.address = handle.cached_internal_ips[0]
        except self._sky.exceptions.ResourcesUnavailableError as error:
            self._lose(name, "lost", NoCapacity(launch.machine, _sentence(error)))
        except SourceFailed as error:
            self._lose(name, "failed", error)
        else:
            self._changes.append(Change(machine=name, state="up", at_s=time.time(), address=launch.address))

    def _check_status(self, ended: set[str]) -> None:
        """Report machines that SkyPilot does not list as up any more, and request the next status."""
        if self._query is not None:
            request, names = self._query
            if request not in ended:
                return
            self._query = None
            records = self._call(self._sky.get, request)
            alive = {record["name"] for record in records if record["status"].value == "UP"}
            for name in names & self._launches.keys():
                if self._name(name) not in alive:
                    spot = self._launches[name].machine.market == "spot"
                    self._lose(name, "preempted" if spot else "lost", None)
        names = frozenset(name for name, launch in self._launches.items() if launch.address is not None)
        if names:
            mode = self._sky.StatusRefreshMode.FORCE  # of the cloud, not SkyPilot's cache
            request = self._call(self._sky.status, [self._name(name) for name in sorted(names)], refresh=mode)
            self._query = str(request), names

    def _lose(self, name: str, why: str, error: DeepvmError | None) -> None:
        self._end(name)  # a part of it may still exist and cost money
        del self._launches[name]
        if error is not None:
            self._refused[name] = error
        self._changes.append(Change(machine=name, state="down", why=why, at_s=time.time()))

    def _end(self, name: str) -> None:
        self._endings[name] = str(self._call(self._sky.down, self._name(name)))

    def _not_gone(self, names: Iterable[str]) -> dict[str, str]:
        """Return the machines whose teardown failed, with the reasons."""
        left = {}
        for name in names:
            request = self._endings.pop(name)
            try:
                if self._ended({request}):
                    self._call(self._sky.get, request)
                else:
                    left[name] = f"not gone after {self._settings.down_within_s:.0f} s"
            except self._sky.exceptions.ClusterDoesNotExist:
                pass
            except SourceFailed as error:
                left[name] = str(error)
        return left

    def _wait(self, requests: Iterable[str], within_s: float) -> None:
        """Wait until these requests have ended or failed, or the time is up."""
        waited, deadline_s = {str(request) for request in requests}, time.monotonic() + within_s
        while waited and time.monotonic() < deadline_s:
            waited -= self._ended(waited)
            if waited:
                time.sleep(min(0.5, max(0.0, deadline_s - time.monotonic())))

    def _ended(self, requests: set[str]) -> set[str]:
        if not requests:
            return set()
        return {one.request_id for one in self._call(self._sky.api_status, sorted(requests)) if one.status in _ENDED}

    def _name(self, machine: str) -> str:
        return cluster_name(self._spec.run, machine)

    def _call(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call SkyPilot, with its output on stderr: stdout is for the run's own result."""
        errors = self._sky.exceptions
        with contextlib.redirect_stdout(sys.stderr):
            try:
                return call(*arguments, **options)
            except (errors.ResourcesUnavailableError, errors.ClusterDoesNotExist):
                raise
            except Exception as error:  # SkyPilot and its server raise errors of many types
                raise SourceFailed(f"SkyPilot failed ({call.__name__}): {_sentence(error)}") from error


def _sentence(error: Exception) -> str:
    lines = (line.strip() for line in _COLOURS.sub("", str(error)).splitlines())
    return next((line for line in lines if line), type(error).__name__)[:300]


def _sdk() -> Any:
    with contextlib.redirect_stdout(sys.stderr):  # its loggers keep the stdout of the import
        try:
            import sky
        except ImportError:
            raise MissingExtra("deepvm run --on skypilot", "skypilot") from None
    if not hasattr(sky.Task, "update_secrets"):
        raise UsageError(f"SkyPilot {sky.__version__} writes secrets into files: pip install 'skypilot>=0.10'")
    return sky
