"""What every strategy would have paid: a market and a job in; cost, time, losses and regret over many starts out.

A strategy knows only what came before its start. The lower bound knows everything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepvm.errors import UnknownName, UsageError
from deepvm.market.builtin import LEAST_DAYS, LEAST_ZONES, builtin_history, builtin_market
from deepvm.market.market import Market
from deepvm.market.reference_prices import SPOT_SHARE
from deepvm.market.reference_prices import on_demand_usd as listed_usd
from deepvm.market.trace import check_meaning
from deepvm.simulate.choice import Promise, choose
from deepvm.simulate.job import GangJob
from deepvm.simulate.oracle import lower_bound_usd
from deepvm.simulate.outcome import Outcomes, spread, summary
from deepvm.simulate.replay import replay
from deepvm.simulate.strategies import NAMES, Maker, Rates
from deepvm.simulate.trace_sets import load_markets

Floats = NDArray[np.float64]
PLAN_EVERY_H = 24.0  # how often the past is looked at again
PAST_H = 14 * 24.0  # older days predict little
ASSUMED_LOSSES_PER_H = 0.5  # of a gang, before any was seen
MOST_ZONES = 27
REGIONS = ("east", "west", "central")
NOT_ENOUGH = f"not enough history: {LEAST_DAYS:g} days and {LEAST_ZONES} zones are needed"
Progress = Callable[[str, int, int], None]  # what is replayed, done, all


@dataclass(frozen=True, kw_only=True)
class Row:
    """One strategy over all starts. The oracle has costs alone."""

    name: str
    cost_usd: Floats
    outcomes: Outcomes | None
    regret: float

    def to_json(self, deadline_h: float | None) -> dict[str, Any]:
        if self.outcomes is None:
            unknown = dict.fromkeys(("hours", "missed", "lost_hours", "moves"))
            return {"name": self.name, "cost_usd": spread(self.cost_usd), **unknown, "regret": self.regret}
        return {"name": self.name, **summary(self.outcomes, deadline_h), "regret": self.regret}


@dataclass(frozen=True, kw_only=True)
class Backtest:
    market: str
    job: GangJob
    rows: tuple[Row, ...]
    starts_h: Floats
    promises: tuple[Promise, ...]  # one for each start
    coverage: float | None  # share of starts whose promised cost and time were kept; None without enough history
    bound_usd: Floats  # the oracle's, by start
    history_h: float
    zones: int

    def to_json(self) -> dict[str, Any]:
        return {
            "market": self.market,
            "strategies": [row.to_json(self.job.deadline_h) for row in self.rows],
            "starts": len(self.starts_h),
            "coverage": self.coverage,
            "history": {
                "hours": self.history_h,
                "zones": self.zones,
                "enough": self.coverage is not None,
                "note": None if self.coverage is not None else NOT_ENOUGH,
            },
        }


@dataclass(frozen=True, kw_only=True)
class Backtests:
    """The same job on several markets, and all of their starts together."""

    job: GangJob
    markets: tuple[Backtest, ...]
    notes: tuple[str, ...]
    left_out: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        covered = [(m.coverage, len(m.starts_h)) for m in self.markets if m.coverage is not None]
        coverage = sum(c * n for c, n in covered) / sum(n for _, n in covered) if covered else None
        rows = self._joined()
        return {
            "strategies": [row.to_json(self.job.deadline_h) for row in rows],
            "starts": sum(len(m.starts_h) for m in self.markets),
            "coverage": coverage,
            "history": {
                "hours": min(m.history_h for m in self.markets),
                "zones": min(m.zones for m in self.markets),
                "enough": coverage is not None,
                "note": None if coverage is not None else NOT_ENOUGH,
            },
            "worse_than": _worse_than(rows),
            "markets": [m.to_json() for m in self.markets],
            "notes": list(self.notes),
            "left_out": dict(self.left_out),
        }

    def _joined(self) -> list[Row]:
        """Return each strategy over all markets. Regret is weighed by cost."""
        joined = []
        bounds = np.concatenate([m.bound_usd for m in self.markets])
        for index, row in enumerate(self.markets[0].rows):
            alike = [m.rows[index] for m in self.markets]
            cost = np.concatenate([r.cost_usd for r in alike])
            parts = [r.outcomes for r in alike if r.outcomes is not None]
            regret = float(cost.mean() / bounds.mean() - 1)
            joined.append(
                Row(name=row.name, cost_usd=cost, outcomes=_concatenated(parts) if parts else None, regret=regret)
            )
        return joined


def backtests(
    folder: Path,
    job: GangJob,
    *,
    meaning: str | None,
    starts: int = 300,
    spot_usd: float | None = None,
    on_demand_usd: float | None = None,
    **settings: Any,
) -> Backtests:
    """Run ``backtest`` on every market of a folder of traces; the starts are shared out among them."""
    meaning = check_meaning(meaning)
    found = load_markets(
        folder, meaning=meaning, machines=job.machines, least_hours=_window_h(job), spot_usd=spot_usd,
        on_demand=on_demand_usd,
    )  # fmt: skip
    share = max(1, round(starts / len(found.markets)))
    return Backtests(
        job=job,
        markets=tuple(backtest(market, job, starts=share, **settings) for market in found.markets),
        notes=found.notes,
        left_out=found.left_out,
    )


def simulate(
    job: GangJob,
    *,
    accelerator: str | None = None,
    zones: int = 5,
    days: float = 30.0,
    spot_usd: float | None = None,
    on_demand_usd: float | None = None,
    starts: int = 300,
    seed: int = 0,
    **settings: Any,
) -> Backtests:
    """Run ``backtest`` on a market that is drawn from built-in figures of an accelerator."""
    if not 1 <= zones <= MOST_ZONES:
        raise UsageError(f"zones is {zones}: it must be from 1 to {MOST_ZONES}")
    names = [f"us-{REGIONS[z // 3 % len(REGIONS)]}-{1 + z // 9}{'abc'[z % 3]}" for z in range(zones)]
    usd = listed_usd(accelerator, 1, names[0]) if on_demand_usd is None else on_demand_usd
    if usd is None:
        raise UsageError(f"no on-demand price is known for {accelerator or 'the machines'}: give --on-demand-price")
    history = builtin_history(accelerator)
    market = builtin_market(
        accelerator, names, seed=seed, days=days, machines=max(job.machines, 16), on_demand_usd=usd,
        spot_usd=SPOT_SHARE * usd if spot_usd is None else spot_usd,
    )  # fmt: skip
    market = replace(market, name=f"a drawn market of {accelerator or 'spot machines'}, {zones} zones, {days:g} days")
    note = f"market drawn from figures of {history.origin}, {history.days:.0f} days, {history.zones} zones"
    return Backtests(
        job=job,
        markets=(backtest(market, job, starts=starts, seed=seed, **settings),),
        notes=(note, *([] if spot_usd is not None else [f"spot at {SPOT_SHARE:.0%} of the on-demand price"])),
        left_out={},
    )


def _window_h(job: GangJob) -> float:
    """Return the time within which a run should end, for the oracle and for the last start."""
    return 3 * job.work_h if job.deadline_h is None else job.deadline_h


def _worse_than(rows: Sequence[Row]) -> list[str]:
    """Say where the planned strategy loses."""
    planned = next((row for row in rows if row.name == "planned"), None)
    if planned is None or planned.outcomes is None:
        return []
    return [
        f"{row.name} is cheaper than planned on average: ${row.cost_usd.mean():,.2f}, ${planned.cost_usd.mean():,.2f}"
        for row in rows
        if row.outcomes is not None and row is not planned and row.cost_usd.mean() < planned.cost_usd.mean()
    ]


def backtest(
    market: Market,
    job: GangJob,
    *,
    rates: Rates | None = None,
    strategies: Sequence[str] = NAMES,
    starts: int = 300,
    seed: int = 0,
    confidence: float = 0.95,
    progress: Progress = lambda *_: None,
) -> Backtest:
    """Run every strategy from the same starts, drawn by the seed."""
    for name in strategies:
        if name not in NAMES:
            raise UnknownName("strategy", name, NAMES)
    if starts < 1:
        raise UsageError(f"starts is {starts}: at least one is needed")
    if market.capacity.max() < job.machines:
        most = int(market.capacity.max())
        raise UsageError(f"the market never has {job.machines} machines at once, at most {most}: ask for fewer workers")
    window_h = _window_h(job)
    room_h = market.hours - window_h
    if room_h <= 0:
        raise UsageError(
            f"the traces have {market.hours:.1f} h and a run may take {window_h:g} h: give longer traces, or less work"
        )
    ticks = np.random.default_rng(seed).integers(0, max(1, int(room_h / market.tick_h)), starts)
    starts_h = np.asarray(np.sort(ticks) * market.tick_h, dtype=np.float64)
    return _Backtest(market, job, rates or Rates(), starts_h, window_h, confidence, progress).run(strategies)


class _Backtest:
    def __init__(
        self, market: Market, job: GangJob, rates: Rates, starts_h: Floats, window_h: float, confidence: float,
        progress: Progress,
    ) -> None:  # fmt: skip
        self.market, self.job, self.rates, self.starts_h = market, job, rates, starts_h
        self.window_h, self.confidence, self.progress = window_h, confidence, progress
        self.on_demand_usd = float(market.on_demand_usd.min())
        self.days = np.floor(starts_h / PLAN_EVERY_H).astype(np.int64)

    def run(self, strategies: Sequence[str]) -> Backtest:
        self.progress("oracle", 0, len(strategies))
        bound = lower_bound_usd(
            self.market, self.job, self.starts_h, window_h=self.window_h, start_h=self.rates.start_s / 3600
        )
        rows, promises = list[Row](), list[Promise]()
        for done, name in enumerate(strategies):
            self.progress(name, done, len(strategies))
            if name == "oracle":
                rows.append(Row(name=name, cost_usd=bound, outcomes=None, regret=0.0))
                continue
            outcomes, promised = self._outcomes(name)
            promises += promised
            regret = float(outcomes.cost_usd.mean() / bound.mean() - 1)
            rows.append(Row(name=name, cost_usd=outcomes.cost_usd, outcomes=outcomes, regret=regret))
        planned = next((row.outcomes for row in rows if row.name == "planned"), None)
        return Backtest(
            market=self.market.name,
            job=self.job,
            rows=tuple(rows),
            starts_h=self.starts_h,
            promises=tuple(promises),
            coverage=None if planned is None else _coverage(planned, promises),
            bound_usd=bound,
            history_h=self.market.hours,
            zones=len(self.market.zones),
        )

    def _outcomes(self, name: str) -> tuple[Outcomes, list[Promise]]:
        """Replay one strategy. What it learns from the past is learnt again every day."""
        parts, promises = list[Outcomes](), list[Promise]()
        for day in np.unique(self.days):
            starts = self.starts_h[self.days == day]
            past = self._past(day)
            maker = Maker(
                job=self.job, rates=self.rates, losses_per_h=self._losses_per_h(past), on_demand_usd=self.on_demand_usd
            )
            if name == "planned":
                promise = choose(past, maker, confidence=self.confidence)
                promises += [promise] * len(starts)
                strategy = promise.strategy
            else:
                strategy = maker.named(name, self._zone(past))
            parts.append(replay(self.market, self.job, strategy, starts))
        return _concatenated(parts), promises

    def _past(self, day: int) -> Market | None:
        last = int(day * PLAN_EVERY_H / self.market.tick_h)
        first = max(0, last - int(PAST_H / self.market.tick_h))
        return self.market.between(first, last) if last > first else None

    def _losses_per_h(self, past: Market | None) -> float:
        """Return how often the gang would have lost machines in an hour of training, over all zones."""
        if past is None:
            return ASSUMED_LOSSES_PER_H
        up = past.capacity >= self.job.machines
        drops = int((up[:, :-1] & ~up[:, 1:]).sum())
        return max(drops, 1) / max(float(up.sum()) * past.tick_h, 1.0)

    def _zone(self, past: Market | None) -> int:
        """Return the zone to stay in: the cheapest for an hour of training, by the past."""
        if past is None:
            return int(np.argmin(self.market.price[:, 0]))
        up = past.capacity >= self.job.machines
        share = up.mean(axis=1)
        return int(np.argmin(np.where(share > 0, past.price.mean(axis=1) / np.maximum(share, 1e-9), np.inf)))


def _concatenated(parts: Sequence[Outcomes]) -> Outcomes:
    names = Outcomes.__dataclass_fields__
    return Outcomes(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def _coverage(outcomes: Outcomes, promises: Sequence[Promise]) -> float | None:
    """Return the share of starts that kept the promised cost and time, of those with enough history."""
    enough = np.array([promise.enough for promise in promises])
    if not enough.any():
        return None
    kept = (outcomes.cost_usd <= [p.most_usd for p in promises]) & (outcomes.hours <= [p.most_h for p in promises])
    return float(kept[enough].mean())
