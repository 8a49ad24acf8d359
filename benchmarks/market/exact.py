"""How exact simulations are: hops against a walk over all ticks, Daly's formula, a market without preemption."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from benchmarks import Measurement, measurement
from deepvm.market import Market
from deepvm.policy.placement import CheapestUp, Placement, Stay
from deepvm.policy.saving import daly_interval_s
from deepvm.simulate import FixedInterval, GangJob, Strategy, replay
from tests.support.simulate.markets import bulk_market
from tests.support.simulate.tick_reference import Run

SEEDS = range(6)
STARTS_H = (0.0, 17.25, 100.1, 3.3, 250.0)


def rows() -> Iterator[Measurement]:
    yield measurement(
        "hops against a walk over all ticks, one zone", [_apart(seed, Stay(0), 1) for seed in SEEDS], unit="h",
        below=1e-9, note="largest difference of 5 starts in each of 6 markets",
    )  # fmt: skip
    yield measurement(
        "the same with moves and shrinking gangs", [_apart(seed, CheapestUp(), 4, least=2) for seed in SEEDS], unit="h",
        below=0.005 * 30, note="0.5 % of 30 h",
    )  # fmt: skip
    yield measurement("waste under Poisson losses against Daly's formula", [_daly()], unit="%", below=0.5)
    yield measurement("no preemption: time against work, start and saves", [_undisturbed()], unit="h", below=1e-9)


def _apart(seed: int, placement: Placement, zones: int, least: int | None = None) -> float:
    market, job = bulk_market(seed, zones=zones), GangJob(work_h=30.0, machines=8, checkpoint_bytes=6 * 10**9)
    strategy = Strategy(
        name="x", saves=FixedInterval(interval_h=0.31, stall_h=0.013, remote_h=0.007), placement=placement,
        start_h=0.04, restore_h=0.011, move_h=0.023, keeper_usd=0.2, least=least,
    )  # fmt: skip
    found = replay(market, job, strategy, STARTS_H)
    walked = np.array([Run(market, job, strategy, start).go().now - start for start in STARTS_H])
    return float(np.abs(found.hours - walked).max())


def _daly() -> float:
    """Spells of exponential length with nothing to wait for: percent from Daly's time."""
    chance, mean_h, stall_h, restore_h, tick_s = np.random.default_rng(1), 6.0, 0.02, 0.05, 20.0
    lengths = np.maximum(1, np.round(chance.exponential(mean_h * 3600, 3500) / tick_s)).astype(np.int64)
    ends = np.cumsum(lengths)
    capacity = np.ones((1, int(ends[-1])), np.int32)
    capacity[0, ends[:-1]] = 0
    market = Market(
        zones=("a",), tick_s=tick_s, capacity=capacity, price=np.ones(capacity.shape), on_demand_usd=np.array([3.0])
    )
    interval_h = daly_interval_s(stall_h * 3600, 1 / (mean_h * 3600)) / 3600
    job = GangJob(work_h=market.hours * 0.6, machines=1)
    saves = FixedInterval(interval_h=interval_h, stall_h=stall_h)
    found = replay(market, job, Strategy(name="x", saves=saves, start_h=0.0, restore_h=restore_h), 0.0)
    daly = mean_h * math.exp(restore_h / mean_h) * (math.exp((interval_h + stall_h) / mean_h) - 1) / interval_h
    return 100 * abs(float((found.hours - found.waiting_h)[0]) / job.work_h / daly - 1)


def _undisturbed() -> float:
    calm = Market(
        zones=("a",), tick_s=600, capacity=np.full((1, 2000), 8, np.int32), price=np.ones((1, 2000)),
        on_demand_usd=np.array([3.0]),
    )  # fmt: skip
    saves = FixedInterval(interval_h=1.0, stall_h=0.01)
    found = replay(calm, GangJob(work_h=24.0, machines=8), Strategy(name="x", saves=saves, start_h=0.1), 5.0)
    return abs(float(found.hours[0]) - (0.1 + 24.0 + 23 * 0.01))
