"""What every strategy would have paid on one market: a job in; cost, time, losses and regret over many starts out.

A strategy knows only what came before its start. The lower bound knows everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from deepvm.errors import Infeasible, UnknownName, UsageError
from deepvm.market.builtin import History, builtin_market, history_of
from deepvm.market.market import Market
from deepvm.market.seeds import generator_of
from deepvm.simulate.backtesting.result import Backtest, Row, regret_of
from deepvm.simulate.choice import LEAST_PAST_H, Promise, choose
from deepvm.simulate.job import GangJob
from deepvm.simulate.oracle import lower_bound_usd
from deepvm.simulate.outcome import Outcomes
from deepvm.simulate.replay import replay
from deepvm.simulate.risk import Risk, patience_h
from deepvm.simulate.strategies import NAMES, Maker, Rates
from deepvm.units import format_hours_up

Floats = NDArray[np.float64]
PLAN_EVERY_H = 24.0  # how often the past is looked at again
MOST_LOOKS = 16  # at the past, by strategies beside a plan's conduct: its drawn worlds are not one long time anyway
PAST_H = 14 * 24.0  # older days predict little
MOST_CELLS = 1_500_000  # ticks × choices of all starts that the oracle looks at: some seconds
LEAST_BOUNDED = 8  # starts
LARGE_GANG = 16  # machines of a zone of the built-in figures
Progress = Callable[[str, int, int], None]  # what is replayed, done, all


def backtest(
    market: Market,
    job: GangJob,
    *,
    rates: Rates | None = None,
    strategies: Sequence[str] = NAMES,
    starts: int = 300,
    seed: int = 0,
    confidence: float = 0.95,
    budget_usd: float | None = None,
    after_h: float = 0.0,
    planned: Risk | None = None,
    starts_h: Floats | None = None,
    progress: Progress = lambda *_: None,
) -> Backtest:
    """Run every strategy from the same starts, drawn by the seed unless ``starts_h`` has them.

    ``planned`` is what a plan's own conduct gave from these starts, instead of a strategy that is chosen every day.

    ``budget_usd`` is the most that the gang and what keeps its checkpoints may cost an hour.
    What came before ``after_h`` is history alone."""
    for name in strategies:
        if name not in NAMES:
            raise UnknownName("strategy", name, NAMES)
    check_starts(starts)
    if planned is None and market.capacity.max() < job.machines:
        most = int(market.capacity.max())
        raise Infeasible(f"the market never has {job.machines} machines at once, at most {most}: ask for fewer workers")
    if not 0 < confidence < 1:
        raise UsageError(f"the confidence is {confidence:g}: it must be between 0 and 1, such as 0.95")
    rates = rates or Rates()
    if starts_h is not None:
        return _Backtest(market, job, rates, starts_h, confidence, budget_usd, planned, progress).run(strategies)
    room_h = market.hours - window_h(job) - after_h
    if room_h <= 0 or after_h < 0:
        raise UsageError(
            f"a run may take {window_h(job):g} h, the traces have {market.hours:.1f} h, {after_h:g} h are history: "
            "give longer traces, or less work"
        )
    ticks = generator_of(seed).integers(0, max(1, int(room_h / market.tick_h)), starts)
    first = int(np.ceil(after_h / market.tick_h - 1e-9))
    starts_h = np.asarray((first + np.sort(ticks)) * market.tick_h, dtype=np.float64)
    return _Backtest(market, job, rates, starts_h, confidence, budget_usd, planned, progress).run(strategies)


class _Backtest:
    def __init__(
        self, market: Market, job: GangJob, rates: Rates, starts_h: Floats, confidence: float,
        budget_usd: float | None, planned: Risk | None, progress: Progress,
    ) -> None:  # fmt: skip
        self.market, self.job, self.rates, self.starts_h = market, job, rates, starts_h
        self.confidence, self.budget_usd, self.progress = confidence, budget_usd, progress
        self.planned = planned
        self.on_demand_usd = float(market.on_demand_usd.min())
        self.spot_usd = market.first_day_usd
        spread_h = 0.0 if planned is None else float(starts_h.max() - starts_h.min()) / MOST_LOOKS
        self.every_h = max(PLAN_EVERY_H, spread_h)
        self.days = np.floor(starts_h / self.every_h).astype(np.int64)
        if planned is None:
            self._check_deadline()

    def run(self, strategies: Sequence[str]) -> Backtest:
        self.progress("oracle", 0, len(strategies))
        some = self._bounded()
        paid = replace(self.job, usd_per_hour_of_waiting=0.0)  # as of the strategies: what is paid, and no waiting
        bound = lower_bound_usd(
            self.market, paid, self.starts_h[some], window_h=window_h(self.job), start_h=self.rates.start_s / 3600
        )
        rows, promises = list[Row](), list[Promise]()
        unpaid: Infeasible | None = None
        for done, name in enumerate(strategies):
            self.progress(name, done, len(strategies))
            if name == "oracle":
                rows.append(Row(name=name, cost_usd=bound, outcomes=None, regret=0.0))
                continue
            try:
                outcomes, promised = self._outcomes(name)
            except Infeasible as error:  # the budget pays no on-demand machine
                unpaid = error
                continue
            promises += promised
            regret = regret_of(outcomes.cost_usd[some], outcomes.finished[some], bound)
            rows.append(Row(name=name, cost_usd=outcomes.cost_usd, outcomes=outcomes, regret=regret))
        if unpaid is not None and not any(row.outcomes is not None and row.outcomes.finished.any() for row in rows):
            raise unpaid
        return Backtest(
            market=self.market.name,
            job=self.job,
            rows=tuple(rows),
            starts_h=self.starts_h,
            promises=tuple(promises),
            bound_usd=bound,
            bounded=some,
            history_h=self.market.hours,
            zones=len(self.market.zones),
            nearest_h=self._nearest_h(rows),
            unpaid=None if unpaid is None else str(unpaid),
            rests_on=None if self.planned is None else self.planned.history,
        )

    def _bounded(self) -> NDArray[np.int64]:
        """Return the starts that the oracle looks at: all of them, or spread ones if the windows are long."""
        cells = window_h(self.job) / self.market.tick_h * (len(self.market.zones) + 1)
        most = max(LEAST_BOUNDED, int(MOST_CELLS / cells))
        return np.unique(np.linspace(0, len(self.starts_h) - 1, min(most, len(self.starts_h))).astype(np.int64))

    def _check_deadline(self) -> None:
        """Refuse a deadline that not even on-demand machines from the first moment keep, by any strategy."""
        if self.job.deadline_h is None:
            return
        past, _ = self._past(0)
        quick = [self._maker(past).named(name) for name in ("on-demand", "tiering")]
        alone_h = min(one.start_h + float(one.saves.needed(self.job.work_h)) for one in quick)
        if self.job.deadline_h < alone_h:
            raise Infeasible(
                f"nothing keeps the deadline of {self.job.deadline_h:g} h: with a start and saves, the work of "
                f"{self.job.work_h:g} h takes {format_hours_up(alone_h)} h, which is the nearest that can be kept"
            )

    def _nearest_h(self, rows: Sequence[Row]) -> float | None:
        """Return the nearest deadline that some strategy keeps, if none keeps the job's with the confidence."""
        found = [row.outcomes for row in rows if row.outcomes is not None]
        if self.job.deadline_h is None or not found:
            return None
        ends = [np.where(outcomes.finished, outcomes.hours, np.inf) for outcomes in found]
        nearest = min(float(np.quantile(hours, self.confidence, method="higher")) for hours in ends)
        return None if nearest <= self.job.deadline_h * (1 + 1e-9) or not np.isfinite(nearest) else nearest

    def _maker(self, past: Market) -> Maker:
        return Maker(
            job=self.job,
            rates=self.rates,
            losses_per_h=self._losses_per_h(past),
            on_demand_usd=self.on_demand_usd,
            budget_usd=self.budget_usd,
            spot_usd=self.spot_usd,
        )

    def _outcomes(self, name: str) -> tuple[Outcomes, list[Promise]]:
        """Replay one strategy. What it learns from the past is learnt again every day."""
        parts, promises = list[Outcomes](), list[Promise]()
        if name == "planned" and self.planned is not None:
            return self.planned.outcomes.for_starts(len(self.starts_h)), promises
        for day in np.unique(self.days):
            starts = self.starts_h[self.days == day]
            past, history = self._past(day)
            maker = self._maker(past)
            if name == "planned":
                promise = choose(past, maker, confidence=self.confidence, history=history)
                promises += [promise] * len(starts)
                strategy = promise.strategy
            else:
                strategy = maker.named(name, self._zone(past))
            parts.append(replay(self.market, self.job, strategy, starts))
        return Outcomes.joined(parts), promises

    def _past(self, day: int) -> tuple[Market, History]:
        """Return what is known on a day: the market so far, or one of built-in figures at today's prices."""
        market, last = self.market, int(day * self.every_h / self.market.tick_h)
        first = max(0, last - int(PAST_H / market.tick_h))
        if (last - first) * market.tick_h >= LEAST_PAST_H:
            past = market.between(first, last)
            return past, history_of(past)
        assumed = builtin_market(
            market.accelerator, market.zones, seed=0, days=PAST_H / 24, machines=max(LARGE_GANG, self.job.machines),
            spot_usd=dict(zip(market.zones, market.price[:, last].tolist(), strict=True)),
            on_demand_usd=dict(zip(market.zones, market.on_demand_usd.tolist(), strict=True)),
        )  # fmt: skip
        return assumed, History(days=0.0, zones=len(market.zones), origin="built-in figures")

    def _losses_per_h(self, past: Market) -> float:
        """Return how often the gang would have lost machines in an hour of training, over all zones."""
        up = past.capacity >= self.job.machines
        drops = int((up[:, :-1] & ~up[:, 1:]).sum())
        return max(drops, 1) / max(float(up.sum()) * past.tick_h, 1.0)

    def _zone(self, past: Market) -> int:
        """Return the zone to stay in: the cheapest for an hour of training, by the past."""
        up = past.capacity >= self.job.machines
        share = up.mean(axis=1)
        return int(np.argmin(np.where(share > 0, past.price.mean(axis=1) / np.maximum(share, 1e-9), np.inf)))


def check_starts(starts: int) -> None:
    if starts < 1:
        raise UsageError(f"starts is {starts}: at least one is needed")


def window_h(job: GangJob) -> float:
    """Return the time within which a run should end, for the oracle and for the last start."""
    return 3 * job.work_h if job.deadline_h is None else min(job.deadline_h, patience_h(job))
