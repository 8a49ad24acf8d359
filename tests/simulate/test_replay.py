"""Replays against a simulator that walks tick by tick, against formulas, and against laws."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepvm.errors import UsageError
from deepvm.market.market import Market
from deepvm.policy.fallback import SafetyNet, UniformProgress
from deepvm.policy.placement import WAIT, CheapestUp, Placement, Stay
from deepvm.policy.saving import daly_interval_s
from deepvm.simulate.job import GangJob
from deepvm.simulate.notices import Notices
from deepvm.simulate.oracle import lower_bound_usd
from deepvm.simulate.replay import replay
from deepvm.simulate.saves import FixedInterval, IntervalsByAge
from deepvm.simulate.strategy import Strategy
from tests.support.simulate.markets import bulk_market
from tests.support.simulate.tick_reference import Run

HOURLY = FixedInterval(interval_h=0.31, stall_h=0.013, remote_h=0.007)


@pytest.mark.parametrize("placement", [Stay(0), CheapestUp(), CheapestUp(ceiling=1.2, way_back=0.9)])
@pytest.mark.parametrize("least", [None, 2])
@pytest.mark.parametrize(
    "notices", [None, Notices(seconds=120.0), Notices(seconds=45.0, share=0.5), Notices(seconds=1500.0)]
)
@pytest.mark.parametrize("seed", range(8))
def test_hops_agree_with_a_walk_over_all_ticks(
    seed: int, notices: Notices | None, least: int | None, placement: Placement
) -> None:
    market = bulk_market(seed, zones=1 if isinstance(placement, Stay) else 4)
    job = GangJob(work_h=30.0, machines=8, checkpoint_bytes=6 * 10**9)
    strategy = Strategy(
        name="x", saves=HOURLY, placement=placement, start_h=0.04, restore_h=0.011, move_h=0.023, keeper_usd=0.2,
        least=least, speed=tuple((k / 8) ** 0.9 for k in range(9)), regroup_h=0.005,
        notices=notices,
    )  # fmt: skip
    starts = np.array([0.0, 17.25, 100.1, 3.3, 250.0])
    found = replay(market, job, strategy, starts)
    walked = [Run(market, job, strategy, start).go() for start in starts]
    for column, figure in (("hours", "now"), ("lost_h", "lost"), ("trained_h", "trained"), ("spot_usd", "spot_usd")):
        expected = np.array([getattr(run, figure) for run in walked]) - (starts if figure == "now" else 0.0)
        assert getattr(found, column) == pytest.approx(expected, abs=1e-9)
    assert found.losses.tolist() == [run.losses for run in walked]
    assert found.moves.tolist() == [run.moves for run in walked]
    assert found.finished.tolist() == [run.finished for run in walked]


@given(seed=st.integers(0, 10_000), deadline=st.floats(1.06, 3.0))
@settings(max_examples=10, deadline=None)
def test_money_and_work_are_conserved_and_no_strategy_beats_the_bound(seed: int, deadline: float) -> None:
    market = bulk_market(seed, zones=3)
    job = GangJob(work_h=20.0, machines=8, deadline_h=20.0 * deadline)
    starts = np.floor(np.random.default_rng(seed).uniform(0, market.hours - 70, 20) / market.tick_h) * market.tick_h
    bound = lower_bound_usd(market, job, starts, start_h=0.02)
    for placement in (Stay(1), CheapestUp()):
        for fallback in (SafetyNet(), SafetyNet(tries=4), UniformProgress()):
            strategy = Strategy(name="x", saves=HOURLY, placement=placement, fallback=fallback, start_h=0.02)
            found = replay(market, job, strategy, starts)
            assert found.finished.all()
            assert (found.trained_h - found.lost_h) == pytest.approx(job.work_h)
            busy = found.hours - found.waiting_h
            assert (busy >= found.trained_h - 1e-9).all()
            assert found.on_demand_usd == pytest.approx(found.on_demand_h * 3.0 * 8)
            assert (found.cost_usd >= bound * (1 - 1e-6)).all()
            if job.deadline_h - job.work_h > 4 * strategy.margin_h:
                assert not found.missed(job.deadline_h).any()


def test_a_safety_net_that_tries_spot_again_rents_on_demand_only_while_there_is_none() -> None:
    capacity = np.zeros((1, 400), np.int32)
    capacity[0, 6 * 14 :] = 8  # up from 14 h on
    market = Market(zones=("a",), tick_s=600, capacity=capacity, price=np.ones((1, 400)), on_demand_usd=np.array([3.0]))
    job = GangJob(work_h=24.0, machines=8, deadline_h=36.0)
    strategies = [
        Strategy(name="x", saves=HOURLY, placement=Stay(0), fallback=SafetyNet(tries=tries), start_h=0.03)
        for tries in (0, 4)
    ]
    once, again = (replay(market, job, strategy, 0.0) for strategy in strategies)
    assert not once.missed(36.0)[0]
    assert not again.missed(36.0)[0]
    assert once.on_demand_h[0] > 24
    assert again.on_demand_h[0] < 5
    assert again.cost_usd[0] < 0.6 * once.cost_usd[0]


def test_without_preemption_a_job_takes_its_work_its_start_and_its_saves() -> None:
    market = bulk_market(0)
    market = Market(
        zones=("a",), tick_s=600, capacity=np.full((1, 2000), 8, np.int32), price=np.ones((1, 2000)),
        on_demand_usd=np.array([3.0]),
    )  # fmt: skip
    job = GangJob(work_h=24.0, machines=8)
    found = replay(market, job, Strategy(name="x", saves=FixedInterval(interval_h=1.0, stall_h=0.01), start_h=0.1), 5.0)
    assert found.hours[0] == pytest.approx(0.1 + 24.0 + 23 * 0.01, abs=1e-12)
    assert found.cost_usd[0] == pytest.approx(8 * found.hours[0])


def test_waste_under_poisson_losses_is_dalys() -> None:
    """Spells of exponential length, nothing to wait for: the time per hour of work is Daly's formula."""
    chance = np.random.default_rng(1)
    mean_h, stall_h, restore_h = 6.0, 0.02, 0.05
    tick_s = 20.0
    lengths = np.maximum(1, np.round(chance.exponential(mean_h * 3600, 3500) / tick_s)).astype(np.int64)
    ends = np.cumsum(lengths)
    capacity = np.ones((1, int(ends[-1])), np.int32)
    capacity[0, ends[:-1]] = 0  # one tick down
    market = Market(
        zones=("a",), tick_s=tick_s, capacity=capacity, price=np.ones(capacity.shape, np.float64),
        on_demand_usd=np.array([3.0]),
    )  # fmt: skip
    interval_h = daly_interval_s(stall_h * 3600, 1 / (mean_h * 3600)) / 3600
    job = GangJob(work_h=market.hours * 0.6, machines=1)
    saves = FixedInterval(interval_h=interval_h, stall_h=stall_h)
    found = replay(market, job, Strategy(name="x", saves=saves, start_h=0.0, restore_h=restore_h), 0.0)
    daly = mean_h * math.exp(restore_h / mean_h) * (math.exp((interval_h + stall_h) / mean_h) - 1) / interval_h
    waited = found.waiting_h[0]
    assert (found.hours[0] - waited) / job.work_h == pytest.approx(daly, rel=0.005)


def test_intervals_of_one_length_are_a_fixed_interval() -> None:
    elapsed = np.linspace(0.0003, 30, 4001)
    fixed = FixedInterval(interval_h=0.4, stall_h=0.03, remote_h=0.05)
    by_age = IntervalsByAge(interval_h=np.full(20, 0.4), stall_h=0.03, remote_h=0.05)
    assert by_age.trained(elapsed) == pytest.approx(fixed.trained(elapsed))
    assert by_age.safe(elapsed) == pytest.approx(fixed.safe(elapsed))
    assert by_age.needed(elapsed) == pytest.approx(fixed.needed(elapsed))


def test_more_zones_never_cost_more_under_the_oracle() -> None:
    market = bulk_market(3, zones=4)
    job = GangJob(work_h=20.0, machines=8, deadline_h=30.0)
    starts = np.arange(0.0, 300.0, 15.0)
    bounds = [lower_bound_usd(market.only(range(count)), job, starts) for count in (1, 2, 3, 4)]
    for fewer, more in pairwise(bounds):
        assert (more <= fewer * (1 + 1e-4)).all()


def test_a_start_outside_of_the_market_is_refused() -> None:
    with pytest.raises(UsageError, match="starts must be from 0 h"):
        replay(bulk_market(0), GangJob(work_h=1.0, machines=8), Strategy(name="x"), [1e9])


@pytest.mark.parametrize(("ceiling", "waits"), [(3.3, True), (3.4, False)])
def test_the_ceiling_is_of_the_price_of_a_machine_also_for_a_part_of_a_gang(ceiling: float, waits: bool) -> None:
    market = Market(
        zones=("cheap", "dear"), tick_s=600, capacity=np.array([[0] * 200, [4] * 200], np.int32),
        price=np.array([[1.0] * 200, [3.33] * 200]), on_demand_usd=np.array([5.0, 5.0]),
    )  # fmt: skip
    job, speed = GangJob(work_h=5.0, machines=8), (0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)  # 4 machines: 0.7
    placement = CheapestUp(ceiling=ceiling)
    found = replay(market, job, Strategy(name="x", placement=placement, least=4, speed=speed), 0.0)
    assert (found.spot_usd[0] == 0, not found.finished[0]) == (waits, waits)
    run = placement.choose(market.capacity[:, :1] >= 4, market.price[:, :1])  # as ``runtime.supervise.gang`` asks
    assert (run[0] == WAIT) == waits
