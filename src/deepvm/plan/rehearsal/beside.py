"""A plan's conduct beside the strategies that a backtest compares: the same market and the same starts for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from deepvm.market.market import Market
from deepvm.market.reference_prices import SPOT_SHARE
from deepvm.plan.rehearsal.planned import Planned
from deepvm.plan.risk.replays import longest_h, starts_of
from deepvm.simulate.backtesting.one_market import backtest, window_h
from deepvm.simulate.backtesting.result import Backtests
from deepvm.simulate.backtesting.several_markets import simulate
from deepvm.simulate.notices import counted_on
from deepvm.units import format_count

DRAWN_STARTS = 300  # of a plan of on-demand machines, for which one start tells all


def beside(
    planned: Planned, *, strategies: Sequence[str], notes: Sequence[str] = (), seed: int = 0, **settings: Any
) -> Backtests:
    """Replay the plan and the other strategies. ``settings`` are those of ``deepvm.simulate.backtest``.

    A plan without spot machines has no market of its own: the others get a drawn one, by the seed."""
    risk = planned.risk()
    if planned.market is None:
        found = simulate(
            planned.job, accelerator=planned.accelerator, spot_usd=planned.spot_usd,
            on_demand_usd=planned.on_demand_usd, strategies=strategies, planned=risk,
            starts=max(DRAWN_STARTS, planned.written.starts), seed=seed, **settings,
        )  # fmt: skip
        return replace(found, notes=(*notes, *found.notes))
    market = _market(planned)
    one = backtest(
        market, planned.job, strategies=strategies, planned=risk,
        starts_h=starts_of(planned.market, planned.written.starts), **settings,
    )  # fmt: skip
    one = replace(one, history_h=planned.market.hours)
    some = [] if len(one.bounded) == len(one.starts_h) else [f"the oracle looks at {len(one.bounded)} of the starts"]
    told = counted_on(planned.notices, planned.written.figures.notice_s)
    return Backtests(job=planned.job, markets=(one,), notes=(*notes, *told, *some), left_out={})


def _market(planned: Planned) -> Market:
    """Return all zones that offer the type, as long as the plan's own replays."""
    spot = planned.market
    assert spot is not None  # noqa: S101 - the caller checks it
    hours = spot.hours + max(longest_h(planned.job), window_h(planned.job))
    made = spot.market(planned.job.machines, range(len(spot.columns)), hours)
    where = f"recorded in {spot.traces}" if spot.traces is not None else "drawn"
    zones = format_count(len(spot.columns), "zone")
    name = f"the plan's market of {spot.draw.accelerator or 'spot machines'}, {zones}, {where}"
    unknown = ~np.isfinite(made.on_demand_usd)  # not offered: the planner never rents these
    usd = np.where(unknown, made.price[:, 0] / SPOT_SHARE, made.on_demand_usd)
    return replace(made, accelerator=spot.draw.accelerator, name=name, on_demand_usd=usd)
