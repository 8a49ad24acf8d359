"""A run's events -> a view of its machines, steps and losses, for ``cli.run.display``."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from deepvm.events import Event
from deepvm.runtime.cluster import Machine
from deepvm.runtime.hub.progress import Progress

SILENT_SCRIPT_S = 60.0  # workers that report nothing for longer cause a warning
NEEDS = "ckpt = deepvm.Checkpointer({...}); step = ckpt.restore() or 0; ckpt.step(step) after each optimizer.step()"
RATE_S = 5.0  # the period over which steps per second are counted

MachineState = Literal["asked", "up", "running", "training", "waiting", "notice", "down"]


@dataclass
class MachineView:
    """One machine of the cluster."""

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
    """A run at one moment."""

    machines: Sequence[MachineView]
    step: int | None = None
    steps_per_s: float | None = None
    saved_step: int | None = None
    saved_at_s: float | None = None
    saved_place: str | None = None
    world_size: int = 0
    cost_usd: float = 0.0
    losses: int = 0
    news: Sequence[Event] = ()


class RunState:
    """Observes events, and keeps the state of machines and training."""

    def __init__(self, machines: Iterable[Machine]) -> None:
        self.machines = {machine.name: MachineView(machine) for machine in machines}
        self.training_since_s: float | None = None  # the first step of this session
        self.group_since_s: float | None = None  # the first group of this session
        self.losses = 0
        self._warned_silent = False
        self._world_size = 0
        self._group: tuple[str, ...] = ()
        self._step_times_s: list[float] = []  # of the last steps

    def observe(self, event: Event) -> None:
        if event.kind == "group":
            self._world_size = int(event.data["world_size"])
            self._group = tuple(event.data["machines"])
            self.group_since_s = self.group_since_s or event.at_s
            for name, machine in self.machines.items():
                if machine.up_at_s is None:
                    continue
                machine.failures = 0  # no group without all that keep checkpoints
                if name in self._group:
                    machine.state, machine.since_s = "running", event.at_s
        elif event.kind == "step":
            if self.training_since_s is None:
                self.training_since_s = event.at_s
            self._step_times_s = [*self._step_times_s[-200:], event.at_s]
            for name, machine in self.machines.items():
                if name in self._group and machine.state == "running":
                    machine.state, machine.since_s = "training", event.at_s
        elif event.machine in self.machines:
            self._observe_machine(self.machines[event.machine], event)

    def _observe_machine(self, machine: MachineView, event: Event) -> None:
        if event.kind == "notice":
            machine.state = "notice"
        elif event.kind == "machine-asked":
            machine.state, machine.since_s = "asked", event.at_s
        elif event.kind == "machine-up":
            machine.state, machine.since_s, machine.up_at_s = "up", event.at_s, event.at_s
        elif event.kind == "machine-down":
            machine.paid_usd, machine.up_at_s = machine.cost_usd(event.at_s), None
            machine.state, machine.since_s = "down", event.at_s

    def silent_script(self, progress: Progress) -> str | None:
        """Return a warning, once, if the script runs and has not called deepvm."""
        since_s = self.group_since_s
        if self._warned_silent or since_s is None or progress.alive or time.time() - since_s < SILENT_SCRIPT_S:
            return None
        self._warned_silent = True
        return (
            f"the script has run for {SILENT_SCRIPT_S:.0f} s without reporting a step. If it never calls deepvm, "
            f"nothing is checkpointed, and training restarts from the beginning after a loss. It needs: {NEEDS}"
        )

    def view(self, progress: Progress, *, training: bool, news: list[Event]) -> View:
        """Return the present state; ``training``: a group trains now."""
        now_s = time.time()
        recent = [at_s for at_s in self._step_times_s if now_s - at_s < RATE_S]
        rate = (len(recent) - 1) / (recent[-1] - recent[0]) if len(recent) > 2 and recent[-1] > recent[0] else None
        for machine in self.machines.values():
            if machine.state in ("running", "training") and not training:  # its group broke: it waits for the next one
                machine.state, machine.since_s = "waiting", now_s
        return View(
            machines=list(self.machines.values()),
            step=progress.step,
            steps_per_s=rate,
            saved_step=progress.saved_step,
            saved_at_s=progress.saved_at_s,
            saved_place=progress.saved_place,
            world_size=self._world_size if training else 0,
            cost_usd=sum(machine.cost_usd(now_s) for machine in self.machines.values()),
            losses=self.losses,
            news=news,
        )
