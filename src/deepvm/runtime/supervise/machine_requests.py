"""Asks a backend for machines: for those of the plan, for another type if there are none, and again later."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from deepvm.events import Event
from deepvm.runtime.backends.base import Backend, NoCapacity
from deepvm.runtime.cluster import Cluster, Machine, billing_facts
from deepvm.runtime.supervise.replan import Replanner


class MachineRequests:
    """``record`` takes the events ``machine-asked`` and ``replanned``; ``on_wait`` is called if nothing fits the budget
    and the machine is requested again after ``again_s``."""

    def __init__(
        self,
        cluster: Cluster,
        backend: Backend,
        *,
        replanner: Replanner | None,
        record: Callable[[Event], None],
        on_wait: Callable[[Machine, NoCapacity], None] = lambda *_: None,
        again_s: float,
    ) -> None:
        self.cluster = cluster  # changes when it is planned anew
        self._backend, self._replanner, self._again_s = backend, replanner, again_s
        self._record, self._on_wait = record, on_wait
        self._retry_at_s: dict[str, float] = {}

    def machine(self, name: str) -> Machine | None:
        return next((machine for machine in self.cluster.machines if machine.name == name), None)

    def request(self, machines: Sequence[Machine]) -> None:
        """Ask for machines; each that the market does not have is replaced by another type, or waited for."""
        left = list(machines)
        while left:
            asked, error = left, None
            try:
                self._backend.up(left)
            except NoCapacity as found:
                at = next((at for at, machine in enumerate(left) if machine.name == found.machine.name), 0)
                asked, error = left[:at], found
            for machine in asked:
                self._record(Event.now("machine-asked", machine.name, **billing_facts(machine)))
            left = left[len(asked) :]
            if error is not None:
                left = [*self._alternatives(left[0], error), *left[1:]]

    def request_alternative(self, machine: Machine, error: NoCapacity) -> None:
        """Ask for another type in the place of a machine that the market does not have."""
        self.request(self._alternatives(machine, error))

    def retry_later(self, name: str) -> None:
        self._retry_at_s[name] = time.monotonic() + self._again_s

    def cancel_retry(self, name: str) -> None:
        self._retry_at_s.pop(name, None)

    def due(self) -> list[Machine]:
        """Return the machines whose time to be requested again has come; each once."""
        names = [name for name, at_s in self._retry_at_s.items() if time.monotonic() >= at_s]
        for name in names:
            del self._retry_at_s[name]
        return [machine for name in names if (machine := self.machine(name)) is not None]

    def _alternatives(self, machine: Machine, error: NoCapacity) -> list[Machine]:
        """Return what the budget buys in its place now, one machine or none."""
        found = None if self._replanner is None else self._replanner.instead_of(self.cluster, machine, str(error))
        if found is None:
            self._on_wait(machine, error)
            self.retry_later(machine.name)
            return []
        self.cluster, changes = found
        self._record(Event.now("replanned", machine.name, changes=list(changes)))
        return [instead for instead in self.cluster.machines if instead.name == machine.name]
