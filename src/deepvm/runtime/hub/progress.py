"""A run's events -> its newest step and checkpoints, for ``hub`` and ``supervise``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from deepvm.events import Event


@dataclass
class Progress:
    """The newest facts that trainers reported."""

    step: int | None = None
    saved_step: int | None = None
    saved_at_s: float | None = None
    saved_place: str | None = None
    save_s: float | None = None
    durable_step: int | None = None
    alive: bool = False  # True if trainers of this session have reported anything

    def recall(self, saves: Iterable[Event]) -> None:
        """Read earlier sessions' saves: this one starts with their newest checkpoint, whose place is not known yet."""
        for event in saves:
            step = event.data.get("step")
            if event.data.get("state") in ("remote", "durable") and isinstance(step, int):
                self.saved_step = max(step, self.saved_step or 0)

    def observe(self, event: Event) -> None:
        """Update from an event. Raise KeyError, TypeError or ValueError if its data is not a trainer's."""
        if event.kind == "step":
            self.step = int(event.data["step"])
            if self.saved_at_s is None and self.step <= (self.saved_step or 0):
                self.saved_step = self.saved_place = None  # training started over: the earlier checkpoint is lost
        elif event.kind == "restored":
            self.step = int(event.data["step"])
            # A checkpoint of an earlier session, or an older one than the newest known.
            if self.saved_step != self.step or self.saved_place is None:
                self.saved_step, self.saved_at_s = self.step, None
                self.saved_place = str(event.data.get("place") or "") or None
        elif event.kind == "save" and event.data.get("state") == "remote":
            self.saved_step, self.saved_at_s = int(event.data["step"]), event.at_s
            self.saved_place = str(event.data.get("place") or "") or self.saved_place
            self.save_s = float(event.data.get("seconds") or 0.0) or self.save_s
        elif event.kind == "save" and event.data.get("state") == "durable":
            self.durable_step = int(event.data["step"])
        self.alive = True
