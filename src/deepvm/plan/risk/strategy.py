"""A plan's conduct and what its cluster takes in, the strategy of its replays out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepvm.json_fields import json_fields
from deepvm.policy.conduct import LAST_MOMENT, Conduct
from deepvm.policy.fallback import SafetyNet
from deepvm.policy.placement import Placement, Stay
from deepvm.policy.policy_text import parse_policy
from deepvm.simulate.notices import Notices
from deepvm.simulate.policy_saves import times_of
from deepvm.simulate.strategy import Overheads, Strategy


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
    replicas: int  # of every checkpoint, in the overheads

    def to_json(self) -> dict[str, Any]:
        return json_fields(self, "overheads machines spot_machines keeper_usd speeds losses_per_h notice_s replicas")


def strategy_of(
    conduct: Conduct, figures: Figures, *, name: str, zones: int, notices: float, most_usd: float | None
) -> Strategy:
    """Return what the simulator runs, in a market of this many zones. ``notices`` is the share of announced losses.

    ``most_usd`` is the on-demand price: as in a run, a gang that moves never pays more for one machine."""
    over, spot = figures.overheads, figures.spot_machines
    times = times_of(
        parse_policy(conduct.save), stall_s=over.stall_s, remote_s=over.remote_s, losses_per_h=figures.losses_per_h
    )
    every_s = over.interval_s(figures.losses_per_h) if times.every_s is None else times.every_s
    anchors = figures.machines - spot if spot else 0
    told = times.at_notice if notices and figures.notice_s else None
    placement: Placement = Stay(0) if zones < 2 else conduct.cheapest_up(most_usd=most_usd)
    return over.strategy(
        name=name,
        saves=times.saves,
        placement=placement,
        fallback=SafetyNet(tries=conduct.fallback_tries) if conduct.fallback == LAST_MOMENT or not spot else None,
        spot_machines=spot if anchors else None,
        least=None if conduct.at_loss == "wait" else max(1, conduct.least_workers - anchors),
        speed=figures.speeds[anchors:] if spot else None,
        keeper_usd=figures.keeper_usd + over.save_usd * 3600 / every_s,
        on_demand_only=not spot,
        notices=None if told is None else Notices(seconds=figures.notice_s, share=notices, policy=told),
    )
