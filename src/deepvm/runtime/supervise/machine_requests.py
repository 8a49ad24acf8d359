"""Machines of a plan -> requests to a backend, with other types or retries if it has none, and events about them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from deepvm.events import Event
from deepvm.runtime.backends.base import Backend, Change, NoCapacity
from deepvm.runtime.cluster import Cluster, Machine, billing_facts
from deepvm.runtime.supervise.replan import Replanner

FAILURES = 3  # of one machine in a row, which end the run


class MachineRequests:
    """``record`` receives the events ``machine-asked``, ``machine-refused``, ``machine-up``, ``machine-down`` and
    ``replanned``; ``on_wait`` is called if nothing fits the budget, so that the machine is requested again after
    ``retry_s``; ``quote`` returns a machine with its place and price of this moment."""

    def __init__(
        self,
        cluster: Cluster,
        backend: Backend,
        *,
        replanner: Replanner | None,
        record: Callable[[Event], None],
        on_wait: Callable[[Machine, NoCapacity], None] = lambda *_: None,
        quote: Callable[[Machine], Machine] = lambda machine: machine,
        retry_s: float,
    ) -> None:
        self.cluster = cluster  # changes when it is replanned
        self._backend, self._replanner, self._retry_s = backend, replanner, retry_s
        self._record, self._on_wait, self._quote = record, on_wait, quote
        self._refused: dict[str, Machine] = {}  # what was refused last, by name, until a machine of that name is up
        self._retry_at_s: dict[str, float] = {}

    def machine(self, name: str) -> Machine | None:
        return next((machine for machine in self.cluster.machines if machine.name == name), None)

    def request(self, machines: Sequence[Machine]) -> None:
        """Request machines. If the market has none of a type, request another type, or the same again later."""
        left = [self._quoted(machine) for machine in machines]
        while left:
            requested, error = left, None
            try:
                self._backend.up(left)
            except NoCapacity as found:
                at = next((at for at, machine in enumerate(left) if machine.name == found.machine.name), 0)
                requested, error = left[:at], found
            for machine in requested:
                self._record(Event.now("machine-asked", machine.name, **billing_facts(machine)))
            left = left[len(requested) :]
            if error is not None:
                self.request_alternative(left.pop(0), error)

    def request_alternative(self, machine: Machine, error: NoCapacity) -> None:
        """Request what the budget buys instead of a machine that the market does not have; if that is nothing, the same
        machine later."""
        planned = self.cluster
        self._refuse(machine, error)
        refused, tried = machine, {machine.place}
        try:
            while (found := self._instead_of(planned, machine, refused, error)) is not None:
                self.cluster, changes = found
                refused = self._quoted(next(each for each in self.cluster.machines if each.name == machine.name))
                if refused.place in tried:  # the market has just changed: ask again later
                    break
                tried.add(refused.place)
                try:
                    self._backend.up([refused])
                except NoCapacity as again:
                    self._refuse(refused, again)
                    continue
                self._record(Event.now("replanned", machine.name, changes=list(changes)))
                self._record(Event.now("machine-asked", machine.name, **billing_facts(refused)))
                return
        except BaseException:
            self.cluster = planned
            raise
        self.cluster = planned
        self._on_wait(machine, error)
        self.retry_later(machine.name)

    def _instead_of(
        self, planned: Cluster, machine: Machine, refused: Machine, error: NoCapacity
    ) -> tuple[Cluster, tuple[str, ...]] | None:
        if self._replanner is None:
            return None
        self._replanner.refused(refused)
        return self._replanner.instead_of(planned, machine, str(error))

    def move(self, cluster: Cluster, changes: Sequence[str]) -> None:
        """Use another cluster from now on. Its machines are requested when those that they replace have ended."""
        self.cluster = cluster
        self._retry_at_s = dict.fromkeys(self._retry_at_s, time.monotonic())
        self._record(Event.now("replanned", changes=list(changes)))

    def retry_later(self, name: str) -> None:
        self._retry_at_s[name] = time.monotonic() + self._retry_s

    def due(self) -> list[Machine]:
        """Return the machines that must be requested again now; each once."""
        names = [name for name, at_s in self._retry_at_s.items() if time.monotonic() >= at_s]
        for name in names:
            del self._retry_at_s[name]
        return [machine for name in names if (machine := self.machine(name)) is not None]

    def observe(self, change: Change) -> Machine | None:
        """Record a change that the backend reports. Return its machine; None if the cluster does not have it."""
        machine, at_s = self.machine(change.machine), change.at_s or None
        if machine is not None and change.state == "up":
            self._retry_at_s.pop(machine.name, None)
            self._refused.pop(machine.name, None)
            self._record(Event.now("machine-up", machine.name, at_s=at_s, **billing_facts(machine)))
        elif machine is not None:
            data = {"why": change.why, "exit_code": change.exit_code}
            self._record(Event.now("machine-down", machine.name, at_s=at_s, **data))
        return machine

    def _quoted(self, machine: Machine) -> Machine:
        """Return a machine at the price of this moment, which the cluster has from now on."""
        quoted = self._quote(machine)
        if quoted != machine:
            machines = tuple(quoted if each.name == machine.name else each for each in self.cluster.machines)
            self.cluster = replace(self.cluster, machines=machines)
        return quoted

    def _refuse(self, machine: Machine, error: NoCapacity) -> None:
        """Record a refusal; repeated ones of the same machine are one."""
        last = self._refused.get(machine.name)
        if last is None or last.place != machine.place:
            self._record(Event.now("machine-refused", machine.name, **billing_facts(machine), why=str(error)))
        self._refused[machine.name] = machine
