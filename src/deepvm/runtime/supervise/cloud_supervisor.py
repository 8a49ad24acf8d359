"""Supervises a cloud's machines from this host: requests them, records their states, and replaces lost ones."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby

from deepvm.errors import DeepvmError, SourceFailed
from deepvm.events import Event
from deepvm.runtime.backends.base import Backend, Change, NoCapacity
from deepvm.runtime.cluster import Cluster, Machine, billing_facts
from deepvm.runtime.ledger.ledger import Ledger
from deepvm.runtime.supervise.machine_requests import MachineRequests
from deepvm.runtime.supervise.replan import Replanner

LOOK_S = 10.0
ASK_AGAIN_S = 60.0  # where the market has none, or the cloud did not answer
GLANCE_S = 0.2  # whether another process ends the run
FAILURES = 3  # of a machine in a row
REPLACED = ("preempted", "lost", "failed")

Show = Callable[[str], None]


class CloudSupervisor:
    """``over`` returns True when another process ends the run: nothing is requested from then on."""

    def __init__(
        self,
        cluster: Cluster,
        backend: Backend,
        ledger: Ledger,
        *,
        show: Show,
        over: Callable[[], bool],
        replanner: Replanner | None = None,
    ) -> None:
        self._backend, self._ledger, self._show, self._over = backend, ledger, show, over
        self._requests = MachineRequests(
            cluster, backend, replanner=replanner or Replanner(), record=self._record, on_wait=self._await_capacity,
            again_s=ASK_AGAIN_S,
        )  # fmt: skip
        self._hub = _in_order(cluster.machines)[0].name
        self._failures: Counter[str] = Counter()

    def begin(self) -> None:
        """Request all machines, one kind after the other: an error then shows which of them exist."""
        machines = _in_order(self._requests.cluster.machines)
        for _, kind in groupby(machines, key=lambda m: (m.role, m.instance, m.market)):
            self._requests.request(list(kind))

    def follow(self) -> None:
        """Supervise until the run is over."""
        while self._paused():
            try:
                changes = self._backend.poll()
            except NoCapacity as error:
                self._replace(error.machine.name, error)
                continue
            except SourceFailed as error:  # it may answer later
                self._show(str(error))
                continue
            for change in changes:
                self._changed(change)
            for machine in self._requests.due():
                self._replace(machine.name)

    def _paused(self) -> bool:
        """Wait for LOOK_S. Return False as soon as the run is over."""
        until_s = time.monotonic() + LOOK_S
        while not self._over():
            if time.monotonic() >= until_s:
                return True
            time.sleep(min(GLANCE_S, max(0.0, until_s - time.monotonic())))
        return False

    def _changed(self, change: Change) -> None:
        machine = self._requests.machine(change.machine)
        if machine is None:
            return
        if change.state == "up":
            self._requests.cancel_retry(machine.name)
            self._record(Event.now("machine-up", machine.name, at_s=change.at_s or None, **billing_facts(machine)))
        else:
            self._record(Event.now("machine-down", machine.name, at_s=change.at_s or None, why=change.why))
        self._show(f"{machine.name} is {change.state}{f' ({change.why})' if change.why else ''}")
        if change.state == "down" and change.why in REPLACED and not self._over():
            if change.why == "failed":
                self._failed(machine.name, "it did not come so far as to join")
            else:
                self._failures[machine.name] = 0
            self._replace(machine.name)

    def _replace(self, name: str, error: NoCapacity | None = None) -> None:
        """Request a machine again; if ``error`` reports missing capacity, another type."""
        machine = self._requests.machine(name)
        if machine is None:
            return
        try:
            if error is None:
                self._requests.request([machine])
            else:
                self._requests.request_alternative(machine, error)
        except SourceFailed as failure:
            self._failed(name, str(failure))
            self._show(f"{name}: {failure}; it is asked for again in {ASK_AGAIN_S:.0f} s")
            self._requests.retry_later(name)

    def _await_capacity(self, machine: Machine, error: NoCapacity) -> None:
        if machine.name == self._hub:
            raise DeepvmError(f"{error}; nothing else fits the budget, and the other machines would meet there")
        self._show(f"{error}; nothing else fits the budget, so it is waited for")

    def _failed(self, name: str, why: str) -> None:
        self._failures[name] += 1
        if self._failures[name] >= FAILURES:
            raise DeepvmError(f"{name} failed {FAILURES} times in a row ({why})")

    def _record(self, event: Event) -> None:
        self._ledger.append([event])
        if event.kind == "replanned":
            self._show("; ".join(event.data["changes"]))


def _in_order(machines: Sequence[Machine]) -> list[Machine]:
    """Sort machines as clouds start them: first the on-demand machine with the hub."""
    return sorted(machines, key=lambda m: (m.market == "spot", not m.keeps, m.role, m.instance))
