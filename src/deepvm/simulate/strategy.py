"""How a job is run: which machines keep its checkpoints, how it saves, where it trains, when it rents on demand."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepvm.errors import UsageError
from deepvm.json_fields import json_fields
from deepvm.performance.checks import check_number
from deepvm.policy.fallback import Fallback, Rest, margin_h
from deepvm.policy.placement import Placement, Stay
from deepvm.policy.saving import daly_interval_s
from deepvm.simulate.job import GangJob
from deepvm.simulate.notices import Notices
from deepvm.simulate.saves import NeverSave, SaveTimes

Floats = NDArray[np.float64]
LEAST_INTERVAL_S = 10.0  # a save more often than this is not worth its bookkeeping
MOST_INTERVAL_S = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """Figures in hours and dollars. ``keeper_usd`` bills from start to end, through outages too."""

    name: str
    saves: SaveTimes = field(default_factory=NeverSave)
    placement: Placement = field(default_factory=Stay)
    fallback: Fallback | None = None
    spot_machines: int | None = None  # of the job's machines; the others, an anchor, are in ``keeper_usd``
    least: int | None = None  # spot machines with which it still trains; None: it waits for all of them
    speed: tuple[float, ...] | None = (
        None  # by spot machines from 0 to all, over that of the job's gang; None: in proportion
    )
    regroup_h: float = 10 / 3600  # when machines come or go while others stay
    keeper_usd: float = 0.0  # an hour, of machines that stay: memory nodes or an anchor
    start_h: float = 120 / 3600  # from a machine's launch to its first step, without the restore
    restore_h: float = 0.0  # of a checkpoint in the same zone
    move_h: float = 0.0  # more, if the checkpoint comes from another zone
    on_demand_only: bool = False
    notices: Notices | None = None  # of losses; None: a loss repeats the work since the last save
    on_demand_machines: int | None = None  # that it rents at most, such as what a budget pays; None: as many as on spot

    def __post_init__(self) -> None:
        for name in ("keeper_usd", "start_h", "restore_h", "move_h", "regroup_h"):
            check_number(name, getattr(self, name), at_least=0)
        if self.spot_machines is not None and self.spot_machines < 0:
            raise UsageError(f"spot_machines is {self.spot_machines}: it must not be negative")

    def spot(self, job: GangJob) -> int:
        return job.machines if self.spot_machines is None else self.spot_machines

    def speeds(self, job: GangJob) -> Floats:
        """Return the speed by number of spot machines, over that of the job's gang."""
        count = self.spot(job)
        if self.speed is None:
            return np.arange(count + 1) / max(1, count) if count else np.ones(1)
        if len(self.speed) != count + 1 or not 0 < self.speed[-1] <= 1 or min(self.speed) < 0:
            raise UsageError(
                f"speed has {len(self.speed)} figures, the last of them {self.speed[-1]:g}: "
                f"it needs {count + 1}, the last of them above 0 and at most 1"
            )
        return np.asarray(self.speed, dtype=np.float64)

    def on_demand(self, job: GangJob) -> tuple[int, float]:
        """Return how many machines it rents on demand, and their speed over that of the whole gang."""
        count = self.spot(job)
        rented = count if self.on_demand_machines is None else min(count, self.on_demand_machines)
        return rented, float(self.speeds(job)[rented])

    @property
    def margin_h(self) -> float:
        """The time before the last moment at which on-demand machines start."""
        return margin_h(
            start_h=self.start_h, restore_h=self.restore_h, move_h=self.move_h, worst_loss_h=self.saves.worst_loss_h
        )

    def rest(self, done_h: Floats, job: GangJob) -> Rest:
        """Return what is left of the job after this much work, for the fallback."""
        _, speed = self.on_demand(job)
        needed_h = self.saves.needed((job.work_h - done_h) / speed) if speed > 0 else np.full_like(done_h, np.inf)
        return Rest(
            work_h=job.work_h, done_h=done_h, deadline_h=job.deadline_h, speed=speed, needed_h=needed_h,
            margin_h=self.margin_h,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Overheads:
    """What saves, restores and starts of a cluster take: seconds, and dollars of one save."""

    start_s: float  # from the request of a machine to its first step, without the restore
    regroup_s: float  # when machines come or go while others stay
    stall_s: float  # of training, by a save
    remote_s: float = 0.0  # until a save is safe
    restore_s: float = 0.0
    move_s: float = 0.0  # more, if the checkpoint comes from another zone
    save_usd: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return json_fields(self, "start_s regroup_s stall_s remote_s restore_s move_s save_usd")

    def interval_s(self, losses_per_h: float) -> float:
        """Return the whole seconds between two saves that lose the least time (Young and Daly), enough to send one."""
        wanted_s = daly_interval_s(self.stall_s, losses_per_h / 3600)
        return float(math.ceil(min(max(wanted_s, LEAST_INTERVAL_S, 2 * self.remote_s), MOST_INTERVAL_S)))

    def lost_share(self, interval_s: float, losses_per_h: float) -> float:
        """Return the hours that an hour of training takes more, by saves and losses."""
        repeated_h = (interval_s / 2 + self.remote_s + self.restore_s + self.start_s) / 3600
        return self.stall_s / interval_s + losses_per_h * repeated_h

    def strategy(self, **decisions: Any) -> Strategy:
        """Return the strategy of a cluster that has these."""
        return Strategy(
            start_h=self.start_s / 3600, restore_h=self.restore_s / 3600, regroup_h=self.regroup_s / 3600,
            move_h=self.move_s / 3600, **decisions,
        )  # fmt: skip
