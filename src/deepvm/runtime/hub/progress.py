"""A run's events -> its newest step and checkpoints."""

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
    alive: bool = False  # whether trainers of this session have told anything

    def recall(self, saves: Iterable[Event]) -> None:
        """Read earlier sessions' saves: this one starts with their newest checkpoint, in a place not known yet."""
        for event in saves:
            step = event.data.get("step")
            if event.data.get("state") in ("remote", "durable") and isinstance(step, int):
                self.saved_step = max(step, self.saved_step or 0)

    def observe(self, event: Event) -> None:
        """Update from an event. Raise KeyError, TypeError or ValueError if its data is not a trainer's."""
        if event.kind == "step":
            self.step = int(event.data["step"])
            if self.saved_at_s is None and self.step <= (self.saved_step or 0):
                self.saved_step = self.saved_place = None  # that of an earlier session is gone: training began again
        elif event.kind == "restored":
            self.step = int(event.data["step"])
            if (
                self.saved_step != self.step or self.saved_place is None
            ):  # of an earlier session, or older than what was thought to be safe
                self.saved_step, self.saved_at_s = self.step, None
                self.saved_place = str(event.data.get("place") or "") or None
        elif event.kind == "save" and event.data.get("state") == "remote":
            self.saved_step, self.saved_at_s = int(event.data["step"]), event.at_s
            self.saved_place = str(event.data.get("place") or "") or self.saved_place
            self.save_s = float(event.data.get("seconds") or 0.0) or self.save_s
        elif event.kind == "save" and event.data.get("state") == "durable":
            self.durable_step = int(event.data["step"])
        self.alive = True
