"""Replays of trials: trials in, each with its risk out. Those that train alike share what the simulator prepares."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

import numpy as np

from deepvm.market.builtin import History
from deepvm.market.market import Market
from deepvm.plan.risk.overheads import lost_node_usd
from deepvm.plan.risk.spot import TypeMarket
from deepvm.plan.risk.trial import Trial
from deepvm.simulate.replay import Tables, replay
from deepvm.simulate.risk import PATIENCE, Risk

NO_MARKET = History(days=0.0, zones=0, origin="on-demand machines are assumed to be there, and to stay")
LONG_H = 1000.0
Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True, eq=False)
class Judged:
    """A trial and what its replays gave."""

    trial: Trial
    risk: Risk

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


class Replays:
    """Replays on one draw of the markets. ``starts`` are spread evenly over it."""

    def __init__(self, market_of: Callable[[int], TypeMarket | None], starts: int) -> None:
        self._market_of, self._starts = market_of, starts
        self._prepared: dict[Hashable, tuple[Market, Tables]] = {}

    def judge(self, trial: Trial) -> Judged:
        if trial.market is None:
            return _on_demand(trial)
        instance = trial.market.instance
        spot = self._market_of(instance)
        assert spot is not None  # noqa: S101 - the trial was made from such a market
        return self.on(trial, spot)

    def on(self, trial: Trial, spot: TypeMarket) -> Judged:
        """Replay on this market, such as one without preemption."""
        job, strategy = trial.job, trial.strategy
        longest_h = _bucketed(job.deadline_h or min(PATIENCE * job.work_h, LONG_H + 3 * job.work_h))
        spots = trial.spot_machines
        least = strategy.least
        key = (id(spot), spots, trial.choice.columns, least, strategy.speed, longest_h)
        if key not in self._prepared:
            market = spot.market(spots, trial.choice.columns, spot.hours + longest_h)
            self._prepared[key] = market, Tables.of(market, job, strategy)
        market, tables = self._prepared[key]
        starts_h = np.linspace(0.0, spot.hours, self._starts, endpoint=False)
        outcomes = replay(market, job, strategy, starts_h, tables=tables)
        return Judged(
            trial=trial,
            risk=Risk(strategy=strategy, outcomes=outcomes, deadline_h=job.deadline_h, history=spot.history),
        )

    def all(self, trials: Iterable[Trial], progress: Progress | None = None) -> list[Judged]:
        trials = list(trials)
        judged = []
        for done, trial in enumerate(trials):
            if progress is not None:
                progress(done, len(trials))
            judged.append(self.judge(trial))
        return judged


def _on_demand(trial: Trial) -> Judged:
    """On-demand machines are never lost: one start tells all."""
    part = next(p for p in trial.cluster if p.role == "worker")
    market = Market(
        zones=("on demand",), tick_s=3600.0, capacity=np.zeros((1, 1), np.int32), price=np.zeros((1, 1)),
        on_demand_usd=np.array([part.usd_per_hour]), priced=False,
    )  # fmt: skip
    outcomes = replay(market, trial.job, trial.strategy, [0.0])
    risk = Risk(strategy=trial.strategy, outcomes=outcomes, deadline_h=trial.job.deadline_h, history=NO_MARKET)
    return Judged(trial=trial, risk=risk)


def _bucketed(hours: float) -> float:
    """Round up, so that trials of similar length share a market."""
    return float(2 ** (np.ceil(np.log2(hours) * 2) / 2))
