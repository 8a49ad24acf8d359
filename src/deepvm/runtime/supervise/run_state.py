"""A run's events -> its machines, steps and losses, for a display."""

from __future__ import annotations

import time
from collections.abc import Iterable

from deepvm.events import Event
from deepvm.runtime.cluster import Machine
from deepvm.runtime.hub.progress import Progress
from deepvm.runtime.supervise.view import MachineView, View

SILENT_SCRIPT_S = 60.0  # that workers run and tell nothing
NEEDS = "ckpt = deepvm.Checkpointer({...}); step = ckpt.restore() or 0; ckpt.step(step) after each optimizer.step()"
RATE_S = 5.0  # steps per second are counted over the last so many


class RunState:
    """Machines by name, and the state of training."""

    def __init__(self, machines: Iterable[Machine]) -> None:
        self.places = {machine.name: MachineView(machine) for machine in machines}
        self.training_since_s: float | None = None  # the first step of this session
        self.group_since_s: float | None = None  # the first group of this session
        self.losses = 0
        self._told_silent = False
        self._world_size = 0
        self._group: tuple[str, ...] = ()
        self._steps: list[tuple[float, int]] = []  # when which was finished, of the last seconds

    def observe(self, event: Event) -> None:
        if event.kind == "group":
            self._world_size = int(event.data["world_size"])
            self._group = tuple(event.data["machines"])
            self.group_since_s = self.group_since_s or event.at_s
            for name, place in self.places.items():
                if place.up_at_s is None:
                    continue
                place.failures = 0  # no group without all that keep checkpoints
                if name in self._group:
                    place.state, place.since_s = "running", event.at_s
        elif event.kind == "step":
            if self.training_since_s is None:
                self.training_since_s = event.at_s
            self._steps = [*self._steps[-200:], (event.at_s, int(event.data["step"]))]
            for name, place in self.places.items():
                if name in self._group and place.state == "running":
                    place.state, place.since_s = "training", event.at_s
        elif event.machine in self.places:
            self._observe_machine(self.places[event.machine], event)

    def _observe_machine(self, place: MachineView, event: Event) -> None:
        if event.kind == "notice":
            place.state = "notice"
        elif event.kind == "machine-asked":
            place.state, place.since_s = "asked", event.at_s
        elif event.kind == "machine-up":
            place.state, place.since_s, place.up_at_s = "up", event.at_s, event.at_s
        elif event.kind == "machine-down":
            place.paid_usd, place.up_at_s = place.cost_usd(event.at_s), None
            place.state, place.since_s = "down", event.at_s

    def silent_script(self, progress: Progress) -> str | None:
        """Return a warning, once, if the script runs and has not called deepvm."""
        since_s = self.group_since_s
        if self._told_silent or since_s is None or progress.alive or time.time() - since_s < SILENT_SCRIPT_S:
            return None
        self._told_silent = True
        return (
            f"the script runs for {SILENT_SCRIPT_S:.0f} s and has told deepvm of no step. If it never calls deepvm, "
            f"nothing is checkpointed, and a lost machine means to begin again. It needs: {NEEDS}"
        )

    def view(self, run: str, progress: Progress, *, training: bool, news: list[Event]) -> View:
        """Return the present state; ``training``: a group trains now."""
        now_s = time.time()
        recent = [at_s for at_s, _ in self._steps if now_s - at_s < RATE_S]
        rate = (len(recent) - 1) / (recent[-1] - recent[0]) if len(recent) > 2 and recent[-1] > recent[0] else None
        for place in self.places.values():
            if place.state in ("running", "training") and not training:  # its group broke: it waits for the next one
                place.state, place.since_s = "waiting", now_s
        return View(
            run=run,
            places=list(self.places.values()),
            step=progress.step,
            steps_per_s=rate,
            saved_step=progress.saved_step,
            saved_at_s=progress.saved_at_s,
            saved_place=progress.saved_place,
            world_size=self._world_size if training else 0,
            cost_usd=sum(place.cost_usd(now_s) for place in self.places.values()),
            losses=self.losses,
            news=news,
        )
