"""The strategies that a backtest compares: a job, prices and transfer rates in, strategies with their overheads out."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from deepvm.performance.checks import check_number
from deepvm.policy.fallback import Fallback, SafetyNet, UniformProgress
from deepvm.policy.placement import CheapestUp, Stay
from deepvm.simulate.job import GangJob
from deepvm.simulate.notices import Notices
from deepvm.simulate.saves import FixedInterval, NeverSave, SaveTimes
from deepvm.simulate.strategy import Overheads, Strategy

NAMES = (
    "on-demand",
    "no-checkpoint",
    "durable",
    "single-anchor",
    "tiering",
    "tiering+move",
    "uniform-progress",
    "planned",
    "oracle",
)
TRIES = 4  # of spot machines, once on-demand ones had to be rented
BOOT_S = 90.0  # from the request of a machine to its first process: EC2 boots in 40 to 90 s


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Figures that a job's overheads are made of. Each default is documented; profiles replace them."""

    start_s: float = BOOT_S + 30.0  # from the request of a machine to its first step: boot, imports, the model
    regroup_s: float = 10.0  # survivors and newcomers form a group; measured here: 3.2 s after a SIGKILL
    stall_s: float = 0.1  # of a save into memory nodes; measured here: 0.03 s for 300 MB, 0.1 s for 1.5 GB
    memory_bytes_per_s: float = 1.25e9  # into one memory node: 10 Gbit/s
    restore_bytes_per_s: float = 1.25e9  # out of one
    durable_stall_s: float = 2.0  # of a save into a durable store, which copies the state first
    durable_bytes_per_s: float = 0.5e9  # into and out of object storage, of one machine
    cross_zone_bytes_per_s: float = 0.6e9  # one flow between zones: 5 Gbit/s
    memory_node_usd: float = 0.2268  # an hour: c6in.xlarge on demand
    memory_node_bytes: float = 6e9  # checkpoints that such a node keeps
    notices: float = 0.0  # share of the losses that are announced; traces do not tell
    notice_s: float = 0.0  # from a notice to the loss, such as ``deepvm.catalog.clouds.notices`` has

    def __post_init__(self) -> None:
        for name in self.__slots__:
            check_number(name, getattr(self, name), at_least=0)
        check_number("notices", self.notices, at_most=1)

    def memory_nodes(self, checkpoint_bytes: int, buffers: int = 2) -> int:
        return max(1, math.ceil(checkpoint_bytes * buffers / self.memory_node_bytes))


@dataclass(frozen=True, kw_only=True, slots=True)
class Maker:
    """Makes the strategies of one job. ``losses_per_h`` is the rate at which the gang loses machines while it is up."""

    job: GangJob
    rates: Rates
    losses_per_h: float
    on_demand_usd: float  # an hour of one machine
    budget_usd: float | None = None  # the most that the gang and what keeps its checkpoints may cost an hour
    spot_usd: float | None = None  # an hour of one machine, by which the budget decides how many it pays

    def named(self, name: str, zone: int = 0) -> Strategy:
        """Return a strategy of NAMES; those that stay train in ``zone``."""
        stay, move = Stay(zone), CheapestUp(way_back=0.9, most_usd=self.on_demand_usd)
        makers = {
            "on-demand": lambda: replace(self.durable(stay), on_demand_only=True, fallback=SafetyNet()),
            "no-checkpoint": lambda: self._strategy(self._overheads(restore_s=0.0), stay, saves=NeverSave()),
            "durable": lambda: self.durable(stay),
            "single-anchor": lambda: self.anchor(stay),
            "tiering": lambda: self.tiering(stay),
            "tiering+move": lambda: self.tiering(move),
            "uniform-progress": lambda: self.tiering(stay, UniformProgress()),
            "planned": lambda: self.tiering(move, SafetyNet(tries=TRIES)),
        }
        return replace(makers[name](), name=name)

    def tiering(self, placement: Stay | CheapestUp, fallback: Fallback | None = None) -> Strategy:
        """Checkpoints in the memory of on-demand nodes in the gang's zone."""
        rates, size = self.rates, self.job.checkpoint_bytes
        nodes = rates.memory_nodes(size)
        over = self._overheads(
            remote_s=size / (rates.memory_bytes_per_s * nodes), restore_s=size / (rates.restore_bytes_per_s * nodes),
            move_s=size / rates.cross_zone_bytes_per_s,
        )  # fmt: skip
        return self._strategy(over, placement, fallback, keeper_usd=nodes * rates.memory_node_usd)

    def durable(self, placement: Stay | CheapestUp, fallback: Fallback | None = None) -> Strategy:
        """Checkpoints in object storage only."""
        rates, size = self.rates, self.job.checkpoint_bytes
        over = self._overheads(
            stall_s=rates.durable_stall_s, remote_s=size / (rates.durable_bytes_per_s * self.job.machines),
            restore_s=size / rates.durable_bytes_per_s,  # each machine reads all of it
        )  # fmt: skip
        return self._strategy(over, placement, fallback)

    def anchor(self, placement: Stay | CheapestUp) -> Strategy:
        """One on-demand machine of the gang keeps the checkpoints, and bills through outages.

        It trains with fewer spot machines than the job's gang if the budget pays no more of them beside the anchor."""
        rates, size, wanted = self.rates, self.job.checkpoint_bytes, self.job.machines
        spot = self._paid_beside(self.on_demand_usd, wanted - 1)
        over = self._overheads(remote_s=size / rates.memory_bytes_per_s, restore_s=size / rates.restore_bytes_per_s)
        made = self._strategy(over, placement, keeper_usd=self.on_demand_usd, spot_machines=spot)
        if spot == wanted - 1:
            return made
        return replace(made, speed=tuple(n / spot * (spot + 1) / wanted for n in range(spot + 1)))

    def _paid_beside(self, keeper_usd: float, most: int) -> int:
        """Return how many spot machines the budget pays beside what keeps the checkpoints, at least one of ``most``."""
        if self.budget_usd is None or not self.spot_usd or most < 1:
            return most
        return min(most, max(1, int((self.budget_usd - keeper_usd) / self.spot_usd + 1e-9)))

    def _overheads(self, *, restore_s: float, **figures: float) -> Overheads:
        rates = self.rates
        usual = {"start_s": rates.start_s, "regroup_s": rates.regroup_s, "stall_s": rates.stall_s}
        return Overheads(restore_s=restore_s, **usual | figures)

    def _strategy(
        self,
        over: Overheads,
        placement: Stay | CheapestUp,
        fallback: Fallback | None = None,
        *,
        saves: SaveTimes | None = None,
        keeper_usd: float = 0.0,
        spot_machines: int | None = None,
    ) -> Strategy:
        rates, every_s = self.rates, over.interval_s(self.losses_per_h)
        at_interval = FixedInterval(
            interval_h=every_s / 3600, stall_h=over.stall_s / 3600, remote_h=over.remote_s / 3600
        )
        made = over.strategy(
            name="",
            saves=saves or at_interval,
            placement=placement,
            fallback=fallback,
            spot_machines=spot_machines,
            keeper_usd=keeper_usd,
            notices=Notices(seconds=rates.notice_s, share=rates.notices) if rates.notices else None,
        )
        if self.budget_usd is None:
            return made
        left, count = max(0.0, self.budget_usd - keeper_usd), made.spot(self.job)
        most = left / max(1, count)
        most = most if placement.most_usd is None else min(most, placement.most_usd)
        hired = min(count, int(left / self.on_demand_usd + 1e-9)) if self.on_demand_usd else count
        return replace(made, placement=replace(placement, most_usd=most), on_demand_machines=hired)
