"""What makes a plan under a market dear or late: a search's result in; the price of preemption, tier and zones out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from deepvm.json_fields import json_fields
from deepvm.plan import architectures
from deepvm.plan.request import Request
from deepvm.plan.result import Plan, Recommendation
from deepvm.plan.risk.replays import Judged
from deepvm.plan.risk.search import Found
from deepvm.plan.risk.trial import Trial, tier_of
from deepvm.units import format_days, format_usd

# By the age of prices in days: how much dearer the chosen zone is than the best one, and how often the bill is over the
# quote by more than 10 %. From AWS's spot prices until 2025-06.
PRICE_AGES = ((1, 0.003, 0.001), (7, 0.033, 0.17), (30, 0.18, 0.42), (365, 0.78, 0.71))
_NEXT_SHARE = 0.002  # of the budget: how exactly the next better one is found
_TIER_NAMES = {"memory": "memory nodes", "durable": "a durable store", "anchor": "an anchor"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """What something costs: the expected dollars and hours with it, less those without it. Negative ones are saved."""

    what: str
    usd: float
    hours: float

    def to_json(self) -> dict[str, Any]:
        return json_fields(self, "what usd hours")


@dataclass(frozen=True, kw_only=True, slots=True)
class RiskReasons:
    preemption: Change | None  # None for on-demand machines
    tier: Change | None  # where checkpoints are, beside the best other place
    zone: Change | None  # one zone more, or the last one of those that the plan has
    fallback: str | None  # why on-demand machines do not save the deadline
    prices: str | None  # what the age of spot prices means
    guess: str | None  # why the figures are a guess

    def to_json(self) -> dict[str, Any]:
        return json_fields(self, "preemption tier zone fallback prices guess")


def risk_reasons(found: Found, price_days: int) -> RiskReasons:
    """Explain the best plan. ``price_days`` is the age of its oldest spot price, zero without one."""
    best = found.best[0]
    history = best.risk.history
    return RiskReasons(
        preemption=_preemption(found, best),
        tier=_tier(found, best),
        zone=_zone(found, best),
        fallback=_no_fallback(best.trial),
        prices=price_age_effect(price_days),
        guess=None if history.enough or best.trial.market is None else str(history),
    )


def _change(what: str, with_it: Judged, without: Judged) -> Change:
    return Change(
        what=what,
        usd=with_it.risk.mean_usd - without.risk.mean_usd,
        hours=with_it.risk.mean_h - without.risk.mean_h,
    )


def _preemption(found: Found, best: Judged) -> Change | None:
    market = best.trial.market
    if market is None:
        return None
    return _change("preemption", best, found.replays.on(best.trial, market.always_up()))


def _tier(found: Found, best: Judged) -> Change | None:
    """Replay the same workers with their checkpoints elsewhere, and compare with the best of these."""
    trial = best.trial
    if trial.market is None:
        return None
    others = [found.replays.judge(other) for other in _other_tiers(trial)]
    if not others:
        return None
    other = min(others, key=lambda one: one.rank)
    return _change(f"{_TIER_NAMES[trial.tier]} instead of {_TIER_NAMES[other.trial.tier]}", best, other)


def _other_tiers(trial: Trial) -> list[Trial]:
    candidate, found = trial.candidate, []
    for name in ("all-spot", "tiering"):
        architecture = architectures.find(name)
        for cluster in architecture.clusters(trial.board, candidate.worker, candidate.nodes, 1):
            tier = tier_of(cluster)
            if tier != trial.tier:
                elsewhere = replace(candidate, architecture=architecture, cluster=cluster)
                changed = trial.changed(elsewhere, replicas=1 if tier == "memory" else 0, by_age=None)
                found.append(replace(changed, tier=tier))
    return found


def _zone(found: Found, best: Judged) -> Change | None:
    trial, columns = best.trial, best.trial.choice.columns
    if trial.market is None:
        return None
    further = next((i for i in range(len(trial.market.columns)) if i not in columns), None)
    if further is not None:
        more = found.replays.judge(trial.changed(columns=(*columns, further)))
        name = trial.market.columns[further].zone or f"a zone of {trial.market.columns[further].region}"
        return _change(f"one more zone ({name})", more, best)
    if len(columns) < 2:
        return None
    fewer = found.replays.judge(trial.changed(columns=columns[:-1]))
    return _change(f"the last of its {len(columns)} zones", best, fewer)


def _no_fallback(trial: Trial) -> str | None:
    request = trial.board.request
    if request.deadline_s is None or trial.market is None or trial.choice.fallback:
        return None
    needed = trial.fallback_hourly_usd
    if not math.isfinite(needed):
        return "these machines are not offered on demand, so nothing saves a late run"
    if needed <= request.budget_usd:
        return "none is needed: the deadline is kept with this confidence without on-demand machines"
    return f"on-demand machines at the last moment would cost {format_usd(needed)}/h, more than the budget"


def price_age_effect(days: int) -> str | None:
    """Say what prices of this age mean, between the measured ages; None for prices of today."""
    if days < 1:
        return None
    dearer, over = (_between(days, [(row[0], row[i]) for row in PRICE_AGES]) for i in (1, 2))
    return (
        f"prices are {format_days(days)}: at that age the chosen zone was {dearer:.0%} dearer than the best one, and "
        f"the bill was over the quote by more than 10 % in {over:.0%} of cases (AWS until 2025-06)"
    )


def _between(days: int, points: Sequence[tuple[int, float]]) -> float:
    """Interpolate over the logarithm of the age."""
    at = min(max(days, points[0][0]), points[-1][0])
    for (low, first), (high, second) in pairwise(points):
        if at <= high:
            return first + (second - first) * (math.log(at / low) / math.log(high / low))
    return points[-1][1]


def next_better_of(request: Request, better: Callable[[Request], Recommendation | None]) -> float | None:
    """Return the smallest budget up to twice the request's that buys more by the estimates, by bisection.

    ``better`` returns a better cluster of another request, or None."""
    low, high = request.budget_usd, 2 * request.budget_usd + 1
    best, nearest_usd = better(replace(request, budget_usd=high)), _NEXT_SHARE * request.budget_usd
    if best is None:
        return None
    while high - low > nearest_usd:
        middle = (low + high) / 2
        found = better(replace(request, budget_usd=middle))
        low, high, best = (middle, high, best) if found is None else (low, middle, found)
    return best.hourly_usd if best.hourly_usd > low else high  # on-demand machines at the end need more than its price


def runner_up_of(plan: Plan, chosen: Recommendation) -> Recommendation | None:
    """Return the best plan of another machine type that ends the job, and in time if there is a deadline."""
    allowed = 0.0 if plan.request.deadline_s is None else 1 - plan.request.confidence
    for other in (*plan.recommendations, *plan.failover):
        in_time = other.expected is not None and other.expected.missed <= allowed + 1e-9
        if in_time and other.worker.instance != chosen.worker.instance:
            return other
    return None


def flip_of_cost(chosen: Recommendation, runner_up: Recommendation | None) -> float | None:
    """Return the price of one worker at which the expected cost is the runner-up's: the spot part grows with it."""
    if runner_up is None or chosen.expected is None or chosen.objective != "cost":
        return None
    spot_usd = float(chosen.expected.risk.outcomes.spot_usd.mean())
    more_usd = runner_up.objective_value - chosen.objective_value
    return chosen.worker.usd_per_hour * (1 + more_usd / spot_usd) if spot_usd > 0 and more_usd >= 0 else None
