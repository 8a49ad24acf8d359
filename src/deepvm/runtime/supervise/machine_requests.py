"""Machines of a plan -> requests to a backend, with other types or retries if it has none, and events about them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from deepvm.events import Event
from deepvm.runtime.backends.base import Backend, Change, NoCapacity
from deepvm.runtime.cluster import Cluster, Machine, billing_facts
from deepvm.runtime.supervise.replan import Replanner

FAILURES = 3  # of one machine in a row, which end the run


class MachineRequests:
    """``record`` receives the events ``machine-asked``, ``machine-up``, ``machine-down`` and ``replanned``; ``on_wait``
    is called if nothing fits the budget, so that the machine is requested again after ``retry_s``."""

    def __init__(
        self,
        cluster: Cluster,
        backend: Backend,
        *,
        replanner: Replanner | None,
        record: Callable[[Event], None],
        on_wait: Callable[[Machine, NoCapacity], None] = lambda *_: None,
        retry_s: float,
    ) -> None:
        self.cluster = cluster  # changes when it is replanned
        self._backend, self._replanner, self._retry_s = backend, replanner, retry_s
        self._record, self._on_wait = record, on_wait
        self._retry_at_s: dict[str, float] = {}

    def machine(self, name: str) -> Machine | None:
        return next((machine for machine in self.cluster.machines if machine.name == name), None)

    def request(self, machines: Sequence[Machine]) -> None:
        """Request machines. If the market has none of a type, request another type, or the same again later."""
        left = list(machines)
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
                left = [*self._alternatives(left[0], error), *left[1:]]

    def request_alternative(self, machine: Machine, error: NoCapacity) -> None:
        """Request another type instead of a machine that the market does not have."""
        self.request(self._alternatives(machine, error))

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
            self._record(Event.now("machine-up", machine.name, at_s=at_s, **billing_facts(machine)))
        elif machine is not None:
            data = {"why": change.why, "exit_code": change.exit_code}
            self._record(Event.now("machine-down", machine.name, at_s=at_s, **data))
        return machine

    def _alternatives(self, machine: Machine, error: NoCapacity) -> list[Machine]:
        """Return what the budget buys instead now: one machine or none."""
        found = None if self._replanner is None else self._replanner.instead_of(self.cluster, machine, str(error))
        if found is None:
            self._on_wait(machine, error)
            self.retry_later(machine.name)
            return []
        self.cluster, changes = found
        self._record(Event.now("replanned", machine.name, changes=list(changes)))
        return [instead for instead in self.cluster.machines if instead.name == machine.name]
