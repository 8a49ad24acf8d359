"""Follows a cloud's machines from here: asks for them, writes down what becomes of them, and replaces what is lost."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from deepvm.errors import DeepvmError, SourceFailed
from deepvm.events import Event
from deepvm.runtime.backends.base import Backend, Change, NoCapacity
from deepvm.runtime.cluster import Cluster, Machine, billing_facts
from deepvm.runtime.ledger.ledger import Ledger
from deepvm.runtime.supervise.replan import Replanner

LOOK_S = 10.0
ASK_AGAIN_S = 60.0  # where the market has none, or the cloud did not answer
GLANCE_S = 0.2  # whether another process ends the run
FAILURES = 3  # of a machine in a row
REPLACED = ("preempted", "lost", "failed")

Say = Callable[[str], None]


class CloudSupervisor:
    """``over`` tells whether another process ends the run: from then on nothing is asked for."""

    def __init__(
        self,
        cluster: Cluster,
        backend: Backend,
        ledger: Ledger,
        *,
        say: Say,
        over: Callable[[], bool],
        replanner: Replanner | None = None,
    ) -> None:
        self.cluster = cluster
        self._backend, self._ledger, self._say, self._over = backend, ledger, say, over
        self._replanner = replanner or Replanner()
        self._hub = _in_order(cluster.machines)[0].name
        self._ask_again_s: dict[str, float] = {}
        self._failures: Counter[str] = Counter()

    def begin(self) -> None:
        """Ask for all machines, one kind after the other, so that it is known which of them there are."""
        for _, kind in groupby(_in_order(self.cluster.machines), key=lambda m: (m.role, m.instance, m.market)):
            self._ask_for(list(kind))

    def follow(self) -> None:
        """Until the run is over."""
        while self._paused():
            try:
                changes = self._backend.poll()
            except NoCapacity as error:
                self._replace(error.machine.name, error)
                continue
            except SourceFailed as error:  # it may answer later
                self._say(str(error))
                continue
            for change in changes:
                self._changed(change)
            for name in [name for name, at_s in self._ask_again_s.items() if time.monotonic() >= at_s]:
                del self._ask_again_s[name]
                self._replace(name)

    def _paused(self) -> bool:
        """Whether there is something to look at, after a while."""
        until_s = time.monotonic() + LOOK_S
        while not self._over():
            if time.monotonic() >= until_s:
                return True
            time.sleep(min(GLANCE_S, max(0.0, until_s - time.monotonic())))
        return False

    def _changed(self, change: Change) -> None:
        machine = self._now(change.machine)
        if machine is None:
            return
        if change.state == "up":
            self._ask_again_s.pop(machine.name, None)
            self._tell("machine-up", machine.name, at_s=change.at_s, **billing_facts(machine))
        else:
            self._tell("machine-down", machine.name, at_s=change.at_s, why=change.why)
        self._say(f"{machine.name} is {change.state}{f' ({change.why})' if change.why else ''}")
        if change.state == "down" and change.why in REPLACED and not self._over():
            if change.why == "failed":
                self._failed(machine.name, "it did not come so far as to join")
            else:
                self._failures[machine.name] = 0
            self._replace(machine.name)

    def _replace(self, name: str, error: NoCapacity | None = None) -> None:
        """Ask for a machine again; with ``error``, which told that there is none, for another type."""
        machine = self._now(name)
        if machine is None:
            return
        try:
            if error is None:
                self._ask_for([machine])
            elif (instead := self._instead_of(machine, error)) is not None:
                self._ask_for([instead])
        except SourceFailed as failure:
            self._failed(name, str(failure))
            self._say(f"{name}: {failure}; it is asked for again in {ASK_AGAIN_S:.0f} s")
            self._ask_again_s[name] = time.monotonic() + ASK_AGAIN_S

    def _ask_for(self, machines: Sequence[Machine]) -> None:
        """Machines of one kind, each of them or another type in its place."""
        left = list(machines)
        while left:
            asked, error = left, None
            try:
                self._backend.up(left)
            except NoCapacity as found:
                at = next((at for at, machine in enumerate(left) if machine.name == found.machine.name), 0)
                asked, error = left[:at], found
            for machine in asked:
                self._tell("machine-asked", machine.name, **billing_facts(machine))
            left = left[len(asked) :]
            if error is not None:
                instead = self._instead_of(left[0], error)
                left = [*([] if instead is None else [instead]), *left[1:]]

    def _instead_of(self, machine: Machine, error: NoCapacity) -> Machine | None:
        """What the budget buys in its place now; None where it has to be waited for."""
        found = self._replanner.instead_of(self.cluster, machine, str(error))
        if found is None:
            if machine.name == self._hub:
                raise DeepvmError(f"{error}; nothing else fits the budget, and the other machines would meet there")
            self._say(f"{error}; nothing else fits the budget, so it is waited for")
            self._ask_again_s[machine.name] = time.monotonic() + ASK_AGAIN_S
            return None
        self.cluster, changes = found
        self._tell("replanned", machine.name, changes=list(changes))
        self._say("; ".join(changes))
        return self._now(machine.name)

    def _failed(self, name: str, why: str) -> None:
        self._failures[name] += 1
        if self._failures[name] >= FAILURES:
            raise DeepvmError(f"{name} failed {FAILURES} times in a row ({why})")

    def _now(self, name: str) -> Machine | None:
        return next((machine for machine in self.cluster.machines if machine.name == name), None)

    def _tell(self, kind: str, machine: str, *, at_s: float | None = None, **data: Any) -> None:
        self._ledger.append([Event(at_s=at_s or time.time(), kind=kind, machine=machine, data=data)])


def _in_order(machines: Sequence[Machine]) -> list[Machine]:
    """As clouds start them: first the on-demand machine where the others meet."""
    return sorted(machines, key=lambda m: (m.market == "spot", not m.keeps, m.role, m.instance))
