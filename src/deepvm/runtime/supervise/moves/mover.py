"""Moves of a run's machines: what has become better, or is due before a deadline, in; ended and requested machines out.

All ranks save before a move that is not forced, so no step is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from deepvm.events import Event
from deepvm.runtime.backends.base import Backend
from deepvm.runtime.cluster import Cluster
from deepvm.runtime.hub.hub import Hub
from deepvm.runtime.supervise.machine_requests import MachineRequests
from deepvm.runtime.supervise.moves.last_moment import LastMoment
from deepvm.runtime.supervise.replan import Replanned, Replanner
from deepvm.runtime.supervise.run_state import MachineView

STOP_S = 5.0  # for machines that did not end after the hub's message
SAVE_S = 60.0  # for the save before a move
LOOK_S = 0.5  # between two looks at the deadline while a group trains: each new step changes the figures


class Mover:
    """``machines`` are the run's, by name; ``reconsider_s`` is the time between two looks at what is best now."""

    def __init__(
        self,
        requests: MachineRequests,
        *,
        backend: Backend,
        hub: Hub,
        machines: Mapping[str, MachineView],
        replanner: Replanner | None,
        last_moment: LastMoment | None,
        record: Callable[[Event], None],
        reconsider_s: float,
    ) -> None:
        self._requests, self._backend, self._hub, self._machines = requests, backend, hub, machines
        self._replanner, self._last_moment, self._record = replanner, last_moment, record
        self._reconsider_s = reconsider_s
        self._reconsider_at_s, self._look_at_s = time.monotonic() + reconsider_s, 0.0
        self._next: tuple[Replanned, int, float] | None = None  # a move, the step to save first, and its deadline
        self._moving: list[str] = []  # machines that end, to be requested elsewhere

    def observe(self, event: Event) -> None:
        if self._last_moment is not None:
            self._last_moment.pace.observe(event)

    def is_hired(self, name: str) -> bool:
        """True if a machine is on demand instead of on spot: no market takes it."""
        return self._last_moment is not None and name in self._last_moment.hired

    def use(self, cluster: Cluster, requested: str | None) -> None:
        """Use a cluster from now on. Machines that must move end, but for the one that is being requested; each is
        requested where it belongs once it has ended."""
        self._hub.want(cluster.machines)
        for machine in cluster.machines:
            view = self._machines[machine.name]
            if machine.name != requested and view.up_at_s is not None and view.machine.place != machine.place:
                self._moving.append(machine.name)
            view.machine = machine

    def ended(self, name: str) -> None:
        """Expect no end of a machine that has ended by itself: its replacement is where it belongs."""
        if name in self._moving:
            self._moving.remove(name)

    def end_moving(self) -> None:
        names, self._moving = self._moving, []
        if names:
            self._hub.stop(names)
            self._backend.down(names, within_s=STOP_S)

    def reconsider(self) -> None:
        """Move to what is better now, or due, once what was trained is saved."""
        if self._next is not None:
            (cluster, changes), step, until_s = self._next
            saved = (self._hub.progress.saved_step or 0) >= step
            if saved or self._hub.round is None or time.monotonic() > until_s:
                self._next = None
                self._requests.move(cluster, changes)
            return
        now_s = time.monotonic()
        if self._hub.round is None or now_s >= self._look_at_s:
            self._look_at_s = now_s + LOOK_S
            self.keep_deadline()
        if self._next or self._replanner is None or now_s < self._reconsider_at_s or self._hub.round is None:
            return
        self._reconsider_at_s = now_s + self._reconsider_s
        self._move(self._replanner.better(self._requests.cluster))

    def keep_deadline(self) -> None:
        """Go on demand, or return to spot machines, if it is time for that."""
        if self._last_moment is None or self._next is not None:
            return
        cluster, progress = self._requests.cluster, self._hub.progress
        whole = all(self._machines[machine.name].up_at_s is not None for machine in cluster.trainers)
        safe = progress.saved_step or 0
        found = self._last_moment.decide(cluster, whole=whole, trained=max(progress.step or 0, safe), safe=safe)
        for text in self._last_moment.take_warnings():
            self._record(Event.now("warning", text=text))
        self._move(found)

    def _move(self, found: Replanned | None) -> None:
        """Move now if nothing has to be saved, else after a save."""
        if found is None:
            return
        step = self._hub.save_now(within_s=SAVE_S)
        if step is None:
            self._requests.move(*found)
        else:
            self._next = found, step, time.monotonic() + SAVE_S
