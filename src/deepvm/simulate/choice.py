"""What to do at one moment, knowing only what came before: a market's past in; a strategy and what it promises out.

The candidates are replayed on the past from many starts. The best is the cheapest, with waiting priced, whose share of
missed deadlines the confidence allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from deepvm.market.builtin import History, history_of
from deepvm.market.market import Market
from deepvm.policy.fallback import SafetyNet
from deepvm.policy.placement import CheapestUp
from deepvm.simulate.job import GangJob
from deepvm.simulate.risk import Risk, risks_of, spread_starts
from deepvm.simulate.strategies import TRIES, Maker
from deepvm.simulate.strategy import Strategy

Floats = NDArray[np.float64]
STARTS = 120  # of the past, for each candidate
HALF_LIFE_H = 48.0  # of a start's weight: recent days tell more of the next ones
DOUBT = 1.15  # the next days are not quite the last ones: 95 % then covered 98.7 % in the mean over public markets
LEAST_PAST_H = 24.0  # with less, the default is taken


@dataclass(frozen=True, kw_only=True)
class Promise:
    """What the past says of a strategy: with ``confidence``, it costs and takes at most this."""

    strategy: Strategy
    past_h: float
    mean_usd: float
    mean_h: float
    most_usd: float
    most_h: float
    confidence: float
    enough: bool  # history for the promise to count


def candidates(maker: Maker) -> list[Strategy]:
    """Return the strategies to choose from: when to move back, how dear a zone may be, which tier, shrink or wait."""
    found = []
    for way_back in (0.95, 0.8, 0.6):
        for ceiling in (2.0, 10.0):
            move = CheapestUp(way_back=way_back, ceiling=ceiling, most_usd=maker.on_demand_usd)
            name = f"move back at {way_back:g}, ceiling {ceiling:g}"
            net = SafetyNet(tries=TRIES)
            memory = maker.tiering(move, net)
            found.append(replace(memory, name=f"memory tier, {name}"))
            found.append(replace(maker.durable(move, net), name=f"durable store, {name}"))
            if maker.job.machines > 1:
                least = max(1, maker.job.machines // 2)
                found.append(replace(memory, name=f"memory tier, shrinks to {least}, {name}", least=least))
    return found


def choose(
    past: Market | None,
    maker: Maker,
    *,
    confidence: float,
    tried: Sequence[Strategy] | None = None,
    history: History | None = None,
) -> Promise:
    """Choose a strategy by the past alone. ``history`` says what that rests on, if not on this market."""
    job, default = maker.job, maker.named("planned")
    if past is None or past.hours < LEAST_PAST_H:
        unknown = float("nan")
        return Promise(
            strategy=default, past_h=0.0 if past is None else past.hours, mean_usd=unknown, mean_h=unknown,
            most_usd=unknown, most_h=unknown, confidence=confidence, enough=False,
        )  # fmt: skip
    best: tuple[tuple[float, float], Risk] | None = None
    weights = _recent(past.hours - spread_starts(past, STARTS))
    allowed = 0.0 if job.deadline_h is None else 1 - confidence  # without a deadline, all runs must end
    for risk in risks_of(past, job, candidates(maker) if tried is None else tried, starts=STARTS):
        outcomes = risk.outcomes
        late = float(weights @ outcomes.missed(job.deadline_h))
        price = float(weights @ (outcomes.cost_usd + job.usd_per_hour_of_waiting * outcomes.hours))
        rank = (max(0.0, late - allowed), price)
        if best is None or rank < best[0]:
            best = (rank, risk)
    assert best is not None  # noqa: S101 - there is always a candidate
    _, risk = best
    usd, hours = risk.outcomes.cost_usd, risk.outcomes.hours
    rests_on = history or history_of(past)
    most = (1 + confidence) / 2  # cost and time are promised together: each may fail half as often
    return Promise(
        strategy=risk.strategy,
        past_h=rests_on.days * 24,
        mean_usd=float(weights @ usd),
        mean_h=float(weights @ hours),
        most_usd=DOUBT * weighted_quantile(usd, weights, most),
        most_h=_latest(DOUBT * weighted_quantile(hours, weights, most), job),
        confidence=confidence,
        enough=rests_on.enough,
    )


def _recent(age_h: Floats) -> Floats:
    """Return the weights of starts by their age."""
    weights = 0.5 ** (age_h / HALF_LIFE_H)
    return np.asarray(weights / weights.sum())


def weighted_quantile(values: Floats, weights: Floats, share: float) -> float:
    """Return the value that this share of the weight does not exceed."""
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    return float(values[order][min(int(np.searchsorted(reached, share * reached[-1])), len(values) - 1)])


def _latest(hours: float, job: GangJob) -> float:
    """Return a promised time; a strategy with a fallback keeps the deadline."""
    return hours if job.deadline_h is None else max(min(hours, job.deadline_h), job.work_h)
