"""What one strategy costs and takes on one market: replays from many starts in, distributions out. For the planner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepvm.errors import UsageError
from deepvm.market.builtin import History, history_of
from deepvm.market.market import Market
from deepvm.policy.fallback import SafetyNet
from deepvm.simulate.job import GangJob
from deepvm.simulate.outcome import Outcomes, summary
from deepvm.simulate.replay import Tables, replay
from deepvm.simulate.strategy import Strategy

Floats = NDArray[np.float64]
STARTS = 200
BINS = 12  # of a distribution
PATIENCE = 10  # a run that takes this many times its work has not finished
LONG_H = 1000.0


@dataclass(frozen=True, kw_only=True)
class Risk:
    """One strategy from many starts, and the history that the figures rest on."""

    strategy: Strategy
    outcomes: Outcomes
    deadline_h: float | None
    history: History

    @property
    def mean_usd(self) -> float:
        return float(self.outcomes.cost_usd.mean())

    @property
    def mean_h(self) -> float:
        return float(self.outcomes.hours.mean())

    @property
    def missed(self) -> float:
        """The share of starts that missed the deadline, or never ended."""
        return float(self.outcomes.missed(self.deadline_h).mean())

    def to_json(self) -> dict[str, Any]:
        return {**summary(self.outcomes, self.deadline_h), "history": self.history.to_json()}

    def distribution(self) -> dict[str, Any]:
        """Return histograms of cost and time: the edges of equal bins, and the share of the starts in each."""
        return {"cost_usd": _histogram(self.outcomes.cost_usd), "hours": _histogram(self.outcomes.hours)}


def _histogram(values: Floats) -> dict[str, list[float]]:
    low, high = float(values.min()), float(values.max())
    if high - low < 1e-6 * max(1.0, abs(high)):  # a plan of on-demand machines has one cost
        return {"edges": [low, high], "share": [1.0]}
    counts, edges = np.histogram(values, bins=BINS, range=(low, high))
    return {"edges": edges.tolist(), "share": (counts / len(values)).tolist()}


def risk_of(
    market: Market, job: GangJob, strategy: Strategy, *, starts: int = STARTS, history: History | None = None
) -> Risk:
    """Replay one strategy from starts spread evenly over the market, which is repeated so that late runs can end."""
    return next(risks_of(market, job, (strategy,), starts=starts, history=history))


def spread_starts(market: Market, count: int) -> Floats:
    """Return starts spread evenly over a market, in hours."""
    return np.linspace(0.0, market.hours, count, endpoint=False)


def patience_h(job: GangJob) -> float:
    """Return the longest that a run of this job is waited for, also before a deadline that is farther away."""
    return LONG_H + 3 * job.work_h


def risks_of(
    market: Market,
    job: GangJob,
    strategies: Sequence[Strategy],
    *,
    starts: int = STARTS,
    history: History | None = None,
) -> Iterator[Risk]:
    """Replay several strategies of one job, one after the other. Those that train in the same places share tables."""
    if starts < 1:
        raise UsageError(f"starts is {starts}: at least one is needed")
    on_time = all(isinstance(one.fallback, SafetyNet) and one.on_demand_machines is None for one in strategies)
    due_h = job.deadline_h if on_time else None
    longest_h = PATIENCE * job.work_h if due_h is None else min(due_h, patience_h(job))
    starts_h = spread_starts(market, starts)
    endless = market.repeated(market.hours + longest_h)
    rests_on = history or history_of(market)
    known: dict[Any, Tables] = {}
    for strategy in strategies:
        alike = (strategy.placement, strategy.spot(job), strategy.least, strategy.speed)
        if alike not in known:
            known[alike] = Tables.of(endless, job, strategy)
        outcomes = replay(endless, job, strategy, starts_h, tables=known[alike])
        yield Risk(strategy=strategy, outcomes=outcomes, deadline_h=job.deadline_h, history=rests_on)
