"""What to do at one moment, knowing only what came before: a market's past in; a strategy and what it promises out.

The candidates are replayed on the past from many starts. The best is the cheapest, with waiting priced, whose share of
missed deadlines the confidence allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from deepvm.market.builtin import history_of
from deepvm.market.market import Market
from deepvm.policy.placement import CheapestUp
from deepvm.simulate.job import GangJob
from deepvm.simulate.outcome import Outcomes
from deepvm.simulate.replay import replay
from deepvm.simulate.strategies import Maker
from deepvm.simulate.strategy import SafetyNet, Strategy

STARTS = 60  # of the past, for each candidate
DOUBT = 1.1  # the next days are not quite the last ones; chosen on public traces, where 95 % then covered 90 to 92 %
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
            memory = maker.tiering(move, SafetyNet())
            found.append(replace(memory, name=f"memory tier, {name}"))
            found.append(replace(maker.durable(move, SafetyNet()), name=f"durable store, {name}"))
            if maker.job.machines > 1:
                least = max(1, maker.job.machines // 2)
                found.append(replace(memory, name=f"memory tier, shrinks to {least}, {name}", least=least))
    return found


def choose(past: Market | None, maker: Maker, *, confidence: float, tried: Sequence[Strategy] | None = None) -> Promise:
    """Choose a strategy by the past alone."""
    job, default = maker.job, maker.named("planned")
    if past is None or past.hours < LEAST_PAST_H:
        unknown = float("nan")
        return Promise(
            strategy=default, past_h=0.0 if past is None else past.hours, mean_usd=unknown, mean_h=unknown,
            most_usd=unknown, most_h=unknown, confidence=confidence, enough=False,
        )  # fmt: skip
    starts = np.linspace(0.0, past.hours * (1 - 1e-9), STARTS, endpoint=False)
    window_h = 3 * job.work_h if job.deadline_h is None else job.deadline_h
    endless = past.repeated(past.hours + 2 * window_h)
    best: tuple[tuple[float, float], Strategy, Outcomes] | None = None
    for strategy in candidates(maker) if tried is None else tried:
        outcomes = replay(endless, job, strategy, starts)
        late = float(outcomes.missed(job.deadline_h).mean())
        price = float((outcomes.cost_usd + job.usd_per_hour_of_waiting * outcomes.hours).mean())
        rank = (max(0.0, late - (1 - confidence)), price)
        if best is None or rank < best[0]:
            best = (rank, strategy, outcomes)
    assert best is not None  # noqa: S101 - there is always a candidate
    _, strategy, outcomes = best
    most = 100 * (1 + confidence) / 2  # cost and time are promised together: each may fail half as often
    return Promise(
        strategy=strategy,
        past_h=past.hours,
        mean_usd=float(outcomes.cost_usd.mean()),
        mean_h=float(outcomes.hours.mean()),
        most_usd=DOUBT * float(np.percentile(outcomes.cost_usd, most)),
        most_h=_latest(DOUBT * float(np.percentile(outcomes.hours, most)), job),
        confidence=confidence,
        enough=history_of(past).enough,
    )


def _latest(hours: float, job: GangJob) -> float:
    """Return a promised time; a strategy with a fallback keeps the deadline."""
    return hours if job.deadline_h is None else max(min(hours, job.deadline_h), job.work_h)
