"""A cloud's machines, supervised from this host: requests them, records their states, and replaces lost ones."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from itertools import groupby

from deepvm.errors import DeepvmError, SourceFailed
from deepvm.events import Event
from deepvm.runtime.backends.base import Backend, Change, NoCapacity
from deepvm.runtime.cluster import Cluster, Machine, hub_of
from deepvm.runtime.ledger.ledger import Ledger
from deepvm.runtime.ledger.recovery import LOSSES
from deepvm.runtime.supervise.machine_requests import FAILURES, MachineRequests
from deepvm.runtime.supervise.replan import Replanner

POLL_S = 10.0
RETRY_S = 60.0  # if the market has none, or the cloud did not answer
ADVISE_S = 600.0  # between two looks at what is best now
ENDED_POLL_S = 0.2  # to detect that another process ends the run

Show = Callable[[str], None]


class CloudSupervisor:
    """``ended`` returns True when another process ends the run: nothing is requested from then on."""

    def __init__(
        self,
        cluster: Cluster,
        backend: Backend,
        ledger: Ledger,
        *,
        show: Show,
        ended: Callable[[], bool],
        replanner: Replanner | None = None,
    ) -> None:
        self._backend, self._ledger, self._show, self._ended = backend, ledger, show, ended
        self._replanner = replanner or Replanner()
        self._advise_at_s = time.monotonic() + ADVISE_S
        self._advised: tuple[str, ...] = ()
        self._requests = MachineRequests(
            cluster,
            backend,
            replanner=self._replanner,
            record=self._record,
            on_wait=self._await_capacity,
            retry_s=RETRY_S,
        )
        self._hub = hub_of(cluster).name
        self._failures: Counter[str] = Counter()

    def begin(self) -> None:
        """Request all machines, the hub first, then one kind after the other: an error shows which of them exist."""
        machines = sorted(
            self._requests.cluster.machines,
            key=lambda m: (m.name != self._hub, m.market == "spot", not m.keeps, m.role, m.instance),
        )
        for _, kind in groupby(machines, key=lambda m: (m.role, m.instance, m.market)):
            self._requests.request(list(kind))

    def follow(self) -> None:
        """Supervise until the run is over."""
        while self._pause():
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
            self._advise()

    def _advise(self) -> None:
        """Show what is better now by more than the threshold, once for each such plan. This process cannot make the
        trainers save, so it leaves the move to the user."""
        if time.monotonic() < self._advise_at_s:
            return
        self._advise_at_s = time.monotonic() + ADVISE_S
        found = self._replanner.better(self._requests.cluster)
        if found is None or found[1] == self._advised:
            return
        self._advised = found[1]
        text = f"another plan is better now: {'; '.join(found[1])}; end the run with --down and start that plan to move"
        self._record(Event.now("warning", text=text))
        self._show(text)

    def _pause(self) -> bool:
        """Wait for POLL_S. Return False as soon as the run is over."""
        until_s = time.monotonic() + POLL_S
        while not self._ended():
            if time.monotonic() >= until_s:
                return True
            time.sleep(min(ENDED_POLL_S, max(0.0, until_s - time.monotonic())))
        return False

    def _changed(self, change: Change) -> None:
        machine = self._requests.observe(change)
        if machine is None:
            return
        self._show(f"{machine.name} is {change.state}{f' ({change.why})' if change.why else ''}")
        if change.state == "down" and change.why in LOSSES and not self._ended():
            if change.why == "failed":
                self._failed(machine.name, "it ended before it joined the run")
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
            self._show(f"{name}: {failure}; it is requested again in {RETRY_S:.0f} s")
            self._requests.retry_later(name)

    def _await_capacity(self, machine: Machine, error: NoCapacity) -> None:
        if machine.name == self._hub:
            raise DeepvmError(f"{error}; nothing else fits the budget, and the run needs this machine for its hub")
        self._show(f"{error}; nothing else fits the budget, so it is requested again later")

    def _failed(self, name: str, why: str) -> None:
        self._failures[name] += 1
        if self._failures[name] >= FAILURES:
            raise DeepvmError(f"{name} failed {FAILURES} times in a row ({why})")

    def _record(self, event: Event) -> None:
        self._ledger.append([event])
        if event.kind == "replanned":
            self._show("; ".join(event.data["changes"]))
