"""Replays of trials: trials in, each with its risk out. Those that train alike share what the simulator prepares."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from deepvm.market.builtin import History
from deepvm.market.market import Market
from deepvm.plan.risk.overheads import lost_node_usd
from deepvm.plan.risk.spot import TypeMarket
from deepvm.plan.risk.trial import Trial
from deepvm.simulate.job import GangJob
from deepvm.simulate.replay import Tables, replay
from deepvm.simulate.risk import PATIENCE, Risk, patience_h
from deepvm.simulate.strategy import Strategy

NO_MARKET = History(days=0.0, zones=0, origin="on-demand machines are assumed to be there, and to stay")
Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True, eq=False)
class Judged:
    """A trial and what its replays gave."""

    trial: Trial
    risk: Risk
    market: TypeMarket | None  # that it was replayed on; None for on-demand clusters

    @property
    def kept(self) -> bool:
        """True if the job ends, and keeps its deadline with the confidence asked for."""
        request = self.trial.board.request
        allowed = 0.0 if request.deadline_s is None else 1 - request.confidence
        return self.risk.missed <= allowed + 1e-9

    @property
    def value(self) -> float:
        """What is least for the best, by the objective."""
        request = self.trial.board.request
        if request.objective == "throughput":
            return -self.trial.candidate.performance
        return self.risk.mean_h if request.objective == "time" else self.usd

    @property
    def usd(self) -> float:
        """The expected cost, with waiting priced, and with the loss of memory nodes that hold the only copy."""
        request, trial = self.trial.board.request, self.trial
        usd = self.risk.mean_usd + request.usd_per_hour_of_waiting * self.risk.mean_h
        if trial.tier != "memory" or trial.choice.replicas > 1:
            return usd
        nodes = sum(part.count for part in trial.cluster if part.role == "memory")
        waiting_h = float(self.risk.outcomes.waiting_h.mean())
        return usd + lost_node_usd(nodes, waiting_h, self.risk.mean_h, self.risk.mean_usd)

    @property
    def rank(self) -> tuple[float, float]:
        """By value; equal ones, such as one cluster with several conducts, by cost."""
        return _rounded(self.value), _rounded(self.usd)


def _rounded(value: float) -> float:
    return float(np.format_float_scientific(value, precision=12))


class Staged(Protocol):
    """What is replayed: a trial, or the conduct of a plan that was read."""

    @property
    def job(self) -> GangJob: ...

    @property
    def strategy(self) -> Strategy: ...

    @property
    def spot_machines(self) -> int: ...

    @property
    def columns(self) -> tuple[int, ...]: ...


class Replays:
    """Replays on one draw of the markets. ``starts`` are spread evenly over it."""

    def __init__(self, market_of: Callable[[int], TypeMarket | None], starts: int) -> None:
        self._market_of, self._starts = market_of, starts
        self._prepared: dict[Hashable, tuple[TypeMarket, Market, Tables]] = {}

    def judge(self, trial: Trial) -> Judged:
        if trial.market is None:
            usd = next(part.usd_per_hour for part in trial.cluster if part.role == "worker")
            return Judged(trial=trial, risk=on_demand_risk(trial.job, trial.strategy, usd), market=None)
        instance = trial.market.instance
        spot = self._market_of(instance)
        assert spot is not None  # noqa: S101 - the trial was made from such a market
        return self.on(trial, spot)

    def on(self, trial: Trial, spot: TypeMarket) -> Judged:
        """Replay on this market, such as one without preemption."""
        return Judged(trial=trial, risk=self.risk(trial, spot), market=spot)

    def risk(self, staged: Staged, spot: TypeMarket) -> Risk:
        job, strategy = staged.job, staged.strategy
        hours = spot.hours + longest_h(job)
        key = (
            spot, staged.spot_machines, staged.columns, strategy.least, strategy.speed, strategy.placement, hours
        )  # fmt: skip
        if key not in self._prepared:
            market = spot.market(staged.spot_machines, staged.columns, hours)
            self._prepared[key] = spot, market, Tables.of(market, job, strategy)
        _, market, tables = self._prepared[key]
        outcomes = replay(market, job, strategy, starts_of(spot, self._starts), tables=tables)
        return Risk(strategy=strategy, outcomes=outcomes, deadline_h=job.deadline_h, history=spot.history)

    def all(self, trials: Iterable[Trial], progress: Progress | None = None) -> list[Judged]:
        trials = list(trials)
        judged = []
        for done, trial in enumerate(trials):
            if progress is not None:
                progress(done, len(trials))
            judged.append(self.judge(trial))
        return judged


def starts_of(spot: TypeMarket, count: int) -> NDArray[np.float64]:
    """Return starts spread evenly over a market, in hours."""
    return np.linspace(0.0, spot.hours, count, endpoint=False)


def longest_h(job: GangJob) -> float:
    """Return how long a run may take, rounded up so that trials of similar length share a market. A deadline beyond
    what the work can use makes no market longer."""
    hours = min(job.deadline_h or PATIENCE * job.work_h, patience_h(job))
    return float(2 ** (np.ceil(np.log2(hours) * 2) / 2))


def on_demand_risk(job: GangJob, strategy: Strategy, usd: float) -> Risk:
    """On-demand machines are never lost: one start tells all. ``usd`` is an hour of one."""
    market = Market(
        zones=("on demand",), tick_s=3600.0, capacity=np.zeros((1, 1), np.int32), price=np.zeros((1, 1)),
        on_demand_usd=np.array([usd]), priced=False,
    )  # fmt: skip
    outcomes = replay(market, job, strategy, [0.0])
    return Risk(strategy=strategy, outcomes=outcomes, deadline_h=job.deadline_h, history=NO_MARKET)
