"""Plans on recorded markets: folders of traces in; regret, deadlines, promises by market, gang and deadline out.

Starts lie in the later part of each market; what came before them is the history that a plan may know.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import numpy as np

from deepvm.errors import DeepvmError
from deepvm.market.builtin import LEAST_DAYS, LEAST_ZONES
from deepvm.market.market import Market
from deepvm.market.trace import Meaning
from deepvm.simulate import Backtest, GangJob, backtest
from deepvm.simulate.backtesting.result import Row
from deepvm.simulate.inputs.trace_sets import load_markets

WORK_H = 24.0
GANGS = (1, 8)
SLACKS = (1.1, 1.25, 1.5)  # deadlines over the work
STRATEGIES = ("on-demand", "tiering+move", "uniform-progress", "planned", "oracle")
MANY_ZONES = 5


@dataclass(frozen=True, kw_only=True)
class Case:
    """One gang with one deadline on one market."""

    slack: float
    result: Backtest

    @property
    def machines(self) -> int:
        return self.result.job.machines

    @property
    def many_zones(self) -> bool:
        return self.result.zones >= MANY_ZONES

    @property
    def regret(self) -> float:
        return self._row("planned").regret or 0.0

    @property
    def missed(self) -> float:
        outcomes = self._row("planned").outcomes
        return float("nan") if outcomes is None else float(outcomes.missed(self.result.job.deadline_h).mean())

    @property
    def promised_over_real(self) -> tuple[float, float]:
        """The promised most of cost and of time, over what 95 of 100 starts kept."""
        promise = self.result.kept.to_json() or {}
        cost, hours = ((row["promised_most"], row["real_p95"]) for row in (promise["cost_usd"], promise["hours"]))
        return cost[0] / cost[1], hours[0] / hours[1]

    def _row(self, name: str) -> Row:
        return next(row for row in self.result.rows if row.name == name)

    def cells(self) -> list[str]:
        promise = self.result.kept.to_json()
        found = [self.result.market, str(self.result.zones), str(self.machines), f"{self.slack:g}"]
        found += [f"{self._row(name).regret or 0.0:+.1%}" for name in ("uniform-progress", "tiering+move", "planned")]
        found += [f"{self.missed:.1%}"]
        if promise is None or self.result.coverage is None:
            return [*found, "not enough history", "", "", ""]
        cost, hours = promise["cost_usd"], promise["hours"]
        return [
            *found,
            f"{self.result.coverage:.1%}",
            "{:.2f}, {:.2f}".format(*self.promised_over_real),
            f"{cost['promised_mean'] / cost['real_mean'] - 1:+.1%}",
            f"{hours['promised_mean'] / hours['real_mean'] - 1:+.1%}",
        ]


COLUMNS = (
    "market", "zones", "gang", "deadline / work", "uniform progress", "tiering+move", "planned", "missed",
    "coverage", "p95 promised / real: cost, time", "mean cost", "mean time",
)  # fmt: skip


def cases(folder: Path, meaning: Meaning, *, share: float, starts: int, seed: int) -> Iterator[Case | str]:
    """Yield every case that the traces can show, and why others cannot be shown."""
    for machines in GANGS:
        job = GangJob(work_h=WORK_H, machines=machines, checkpoint_bytes=6 * 10**9, deadline_h=WORK_H * max(SLACKS))
        try:
            found = load_markets(folder, job, meaning=meaning, least_hours=0.0)
        except DeepvmError as error:
            yield str(error)
            continue
        yield from (f"{machines} machines: {name}: {why}" for name, why in found.left_out.items())
        for market in found.markets:
            yield from of_market(market, job, share=share, starts=starts, seed=seed)


def of_market(
    market: Market, job: GangJob, *, share: float, starts: int, seed: int, strategies: Sequence[str] = STRATEGIES
) -> Iterator[Case | str]:
    for slack in SLACKS:
        try:
            result = backtest(
                market, replace(job, deadline_h=job.work_h * slack), strategies=strategies, starts=starts, seed=seed,
                after_h=share * market.hours,
            )  # fmt: skip
        except DeepvmError as error:
            yield f"{job.machines} machines, deadline {slack:g} of the work: {market.name}: {error}"
            continue
        yield Case(slack=slack, result=result)


def smaller_markets(folder: Path, meaning: Meaning, *, share: float, starts: int, seed: int) -> Iterator[Case]:
    """Yield markets of some zones of each set with enough history, for its promises alone.

    Starts of one market overlap: many markets are needed to judge a promise of 95 %."""
    job = GangJob(work_h=WORK_H, machines=max(GANGS), checkpoint_bytes=6 * 10**9, deadline_h=WORK_H * max(SLACKS))
    for whole in load_markets(folder, job, meaning=meaning, least_hours=0.0).markets:
        if share * whole.hours < LEAST_DAYS * 24:
            continue
        for count in range(LEAST_ZONES, len(whole.zones)):
            for zones in combinations(range(len(whole.zones)), count):
                yield from (
                    case
                    for case in of_market(
                        whole.only(zones), job, share=share, starts=starts, seed=seed, strategies=("planned",)
                    )
                    if isinstance(case, Case)
                )


def pooled_error(found: Sequence[Case], what: str) -> float:
    """Return how far the promised mean is from the real one, over all cases with enough history."""
    promises = [case.result.kept.to_json() for case in found]
    rows = [promise[what] for promise in promises if promise is not None]
    if not rows:
        return float("nan")
    ratios = [row["promised_mean"] / row["real_mean"] for row in rows]
    return abs(float(np.mean(ratios)) - 1)
