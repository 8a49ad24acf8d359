"""How a cluster is run, and what that is expected to cost and take: values of a plan, their JSON, a strategy of them.

``deepvm run`` reads a conduct; ``Conduct.strategy`` is what a plan's replays and ``deepvm simulate plan.json`` run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from deepvm.json_fields import json_fields
from deepvm.policy.fallback import SafetyNet
from deepvm.policy.placement import CheapestUp, Placement, Stay
from deepvm.policy.policy_text import parse_policy
from deepvm.simulate.notices import Notices
from deepvm.simulate.policy_saves import times_of
from deepvm.simulate.risk import Risk
from deepvm.simulate.strategy import Strategy

if TYPE_CHECKING:
    from deepvm.plan.risk.overheads import Overheads

Tier = Literal["memory", "durable", "anchor"]
AtLoss = Literal["wait", "shrink"]
Fallback = Literal["none", "on-demand at the last moment"]
LAST_MOMENT: Fallback = "on-demand at the last moment"
BINS = 12  # of a distribution


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What replays of a cluster need beside its conduct."""

    overheads: Overheads
    machines: int  # that train
    spot_machines: int  # of these; 0 for on-demand clusters
    keeper_usd: float  # an hour of the machines that stay: memory nodes or an anchor
    speeds: tuple[float, ...]  # by machines that train, from none to all, over that of all
    losses_per_h: float  # of the gang, while it trains
    notice_s: float  # that the cloud promises

    def to_json(self) -> dict[str, Any]:
        return json_fields(self, "overheads machines spot_machines keeper_usd speeds losses_per_h notice_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class Conduct:
    """The decisions of a run. Zones are in order of preference; a region stands for any of its zones."""

    zones: tuple[str, ...]
    way_back: float | None  # move when another zone is up for less than this share of the price; None in one zone
    ceiling: float | None  # never start in a zone dearer than this many times the cheapest; None in one zone
    at_loss: AtLoss
    least_workers: int  # of the cluster's machines that train; fewer wait
    save: str  # as ``deepvm.policy.parse_policy`` reads it
    tier: Tier
    replicas: int  # of every checkpoint in memory; 0 in a durable store
    fallback: Fallback
    fallback_tries: int = 0  # of spot machines, while time is left, once on-demand ones had to be rented

    def __post_init__(self) -> None:
        parse_policy(self.save)

    def to_json(self) -> dict[str, Any]:
        return json_fields(
            self, "zones way_back ceiling at_loss least_workers save tier replicas fallback fallback_tries"
        )

    def strategy(self, figures: Figures, *, name: str, zones: int, notices: float) -> Strategy:
        """Return what the simulator runs, in a market of this many zones. ``notices`` is the share of announced
        losses."""
        over, spot = figures.overheads, figures.spot_machines
        times = times_of(
            parse_policy(self.save), stall_s=over.stall_s, remote_s=over.remote_s, losses_per_h=figures.losses_per_h
        )
        every_s = over.interval_s(figures.losses_per_h) if times.every_s is None else times.every_s
        anchors = figures.machines - spot if spot else 0
        told = times.at_notice if notices and figures.notice_s else None
        return Strategy(
            name=name,
            saves=times.saves,
            placement=self._placement(zones),
            fallback=SafetyNet(tries=self.fallback_tries) if self.fallback == LAST_MOMENT or not spot else None,
            spot_machines=spot if anchors else None,
            least=None if self.at_loss == "wait" else max(1, self.least_workers - anchors),
            speed=figures.speeds[anchors:] if spot else None,
            regroup_h=over.regroup_s / 3600,
            keeper_usd=figures.keeper_usd + over.save_usd * 3600 / every_s,
            start_h=over.start_s / 3600,
            restore_h=over.restore_s / 3600,
            move_h=over.move_s / 3600,
            on_demand_only=not spot,
            notices=None if told is None else Notices(seconds=figures.notice_s, share=notices, policy=told),
        )

    def _placement(self, zones: int) -> Placement:
        if zones < 2:
            return Stay(0)
        return CheapestUp(way_back=self.way_back, ceiling=self.ceiling or CheapestUp().ceiling)


@dataclass(frozen=True, kw_only=True, eq=False)
class Expected:
    """What replays of a recommendation gave, over many starts."""

    risk: Risk
    notes: tuple[str, ...] = ()  # what the history does not show

    @property
    def cost_usd(self) -> float:
        return self.risk.mean_usd

    @property
    def hours(self) -> float:
        return self.risk.mean_h

    @property
    def missed(self) -> float:
        return self.risk.missed

    @property
    def guess(self) -> bool:
        """True if the history is too short, or of another accelerator."""
        return not self.risk.history.enough

    def to_json(self) -> dict[str, Any]:
        return {**self.risk.to_json(), "notes": list(self.notes)}

    def distribution(self) -> dict[str, Any]:
        """Return histograms of cost and time: the edges of equal bins, and the share of the starts in each."""
        outcomes = self.risk.outcomes
        return {"cost_usd": _histogram(outcomes.cost_usd), "hours": _histogram(outcomes.hours)}


def _histogram(values: Any) -> dict[str, list[float]]:
    low, high = float(values.min()), float(values.max())
    if high - low < 1e-6 * max(1.0, abs(high)):  # a plan of on-demand machines has one cost
        return {"edges": [low, high], "share": [1.0]}
    counts, edges = np.histogram(values, bins=BINS, range=(low, high))
    return {"edges": edges.tolist(), "share": (counts / len(values)).tolist()}
