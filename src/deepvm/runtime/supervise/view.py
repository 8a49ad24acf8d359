"""A run at one moment, for a display."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from deepvm.events import Event
from deepvm.runtime.cluster import Machine

MachineState = Literal["asked", "up", "running", "training", "waiting", "notice", "down"]


@dataclass
class MachineView:
    """One machine of the cluster, at that moment."""

    machine: Machine
    state: MachineState = "asked"
    since_s: float = 0.0
    up_at_s: float | None = None
    paid_usd: float = 0.0  # until it was last down
    failures: int = 0

    def cost_usd(self, now_s: float) -> float:
        running_s = 0.0 if self.up_at_s is None else now_s - self.up_at_s
        return self.paid_usd + running_s / 3600 * self.machine.usd_per_hour


@dataclass
class View:
    """The whole run, at that moment."""

    run: str
    places: Sequence[MachineView]
    step: int | None = None
    steps_per_s: float | None = None
    saved_step: int | None = None
    saved_at_s: float | None = None
    saved_place: str | None = None
    world_size: int = 0
    cost_usd: float = 0.0
    losses: int = 0
    news: Sequence[Event] = ()
