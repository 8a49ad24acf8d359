"""Losses that a cloud announces: what the policy of notices saves, how often, and what does not change."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from deepvm.catalog.clouds.notices import notice_s
from deepvm.errors import UsageError
from deepvm.policy import AnyOf, AtNotice, EverySteps, NoticePolicy, YoungDaly, YoungDalyByAge, at_notice, parse_policy
from deepvm.runtime.notices.gcp import PREEMPTED_S
from deepvm.simulate.backtesting.one_market import backtest
from deepvm.simulate.by_age import intervals_by_age
from deepvm.simulate.job import GangJob
from deepvm.simulate.notices import Notices
from deepvm.simulate.policy_saves import times_of
from deepvm.simulate.replay import replay
from deepvm.simulate.saves import FixedInterval, IntervalsByAge, NeverSave, PolicySaves, SaveTimes
from deepvm.simulate.strategies import Rates
from deepvm.simulate.strategy import Strategy
from tests.support.simulate.markets import bulk_market

HOUR_S = 3600.0
JOB = GangJob(work_h=30.0, machines=8, checkpoint_bytes=6 * 10**9)


@pytest.mark.parametrize("seconds", [0.0, 0.3, 12.0, 25.0, 40.0, 120.0])
@pytest.mark.parametrize(("stall_s", "remote_s"), [(0.0, 0.0), (0.5, 15.0), (2.0, 60.0)])
def test_what_survives_is_what_the_policy_says_at_every_moment(seconds: float, stall_s: float, remote_s: float) -> None:
    saves = FixedInterval(interval_h=100 / HOUR_S, stall_h=stall_s / HOUR_S, remote_h=remote_s / HOUR_S)
    policy = NoticePolicy(margin=1.25)
    told_s = np.arange(0.5, 400.0, 3.7)
    found = Notices(seconds=seconds, policy=policy).kept(saves, told_s / HOUR_S) * HOUR_S
    for at_s, kept_s in zip(told_s, found, strict=True):
        begun = [k for k in range(9) if k * (100 + stall_s) + 100 <= at_s]
        age_s = at_s - (begun[-1] * (100 + stall_s) + 100) if begun else None
        under_way = age_s is not None and age_s < stall_s + remote_s
        covered_s = 100.0 * len(begun)
        work_s = float(saves.trained(at_s / HOUR_S)) * HOUR_S
        decision = at_notice(
            seconds_left=seconds,
            unsaved_steps=int(work_s > covered_s + 1e-6),
            save_s=stall_s + remote_s,
            under_way_for_s=age_s if under_way else None,
            policy=policy,
        )
        safe_s = float(saves.safe(at_s / HOUR_S)) * HOUR_S
        expected = {"save": work_s, "finish": covered_s, "rely": safe_s}[decision.choice]
        assert kept_s == pytest.approx(expected, abs=1e-6), decision.why


def test_a_share_of_the_losses_is_announced_and_the_same_ones_to_everybody() -> None:
    zone, tick = np.repeat(np.arange(9), 5000), np.tile(np.arange(5000), 9)
    for share in (0.0, 0.1, 0.5, 0.9, 1.0):
        told = Notices(seconds=30.0, share=share).announced(zone, tick)
        assert told.mean() == pytest.approx(share, abs=0.01)
        assert Notices(seconds=120.0, share=share).announced(zone, tick).tolist() == told.tolist()
    few, many = (Notices(seconds=30.0, share=share).announced(zone, tick) for share in (0.3, 0.6))
    assert many[few].all(), "more notices are the same ones and others"
    assert abs(np.corrcoef(many[:-1], many[1:])[0, 1]) < 0.02


def test_without_notices_nothing_changes_and_with_them_less_is_lost() -> None:
    market, starts = bulk_market(3, zones=3), np.arange(0.0, 300.0, 5.0)
    plain = Strategy(name="x", saves=FixedInterval(interval_h=0.5, stall_h=1 / HOUR_S, remote_h=5 / HOUR_S))
    found = replay(market, JOB, plain, starts)
    never = replay(market, JOB, replace(plain, notices=Notices(seconds=120.0, share=0.0)), starts)
    always = replay(market, JOB, replace(plain, notices=Notices(seconds=120.0)), starts)
    assert never.cost_usd.tolist() == found.cost_usd.tolist()
    assert found.lost_h.mean() > 1
    assert always.lost_h.max() == 0, "every save fits, and the gang stops there"
    assert (always.hours <= found.hours + 120 / HOUR_S).all()
    assert always.hours.mean() < found.hours.mean()


def test_a_gang_without_checkpoints_saves_at_notices_only_if_its_policy_says_so() -> None:
    market, starts = bulk_market(3), [0.0, 20.0]
    told = Notices(seconds=120.0)
    never, at_notices = (
        replay(market, JOB, Strategy(name="x", saves=saves, notices=told), starts)
        for saves in (NeverSave(), NeverSave(save_h=2 / HOUR_S))
    )
    assert never.lost_h.min() > 0
    assert at_notices.lost_h.max() == 0


@pytest.mark.parametrize(
    "other",
    [
        IntervalsByAge(interval_h=np.full(7, 0.4), stall_h=0.03, remote_h=0.05),
        PolicySaves(policy=parse_policy("every 40 steps"), work_h=20, step_h=0.01, stall_h=0.03, remote_h=0.05),
    ],
)
def test_saves_are_as_old_under_every_law_of_the_same_interval(other: SaveTimes) -> None:
    elapsed = np.linspace(0.0003, 8, 2000)
    fixed = FixedInterval(interval_h=0.4, stall_h=0.03, remote_h=0.05)
    assert other.age_h(elapsed) == pytest.approx(fixed.age_h(elapsed))
    assert other.save_h == pytest.approx(fixed.save_h)


def test_times_of_a_policy_are_those_that_a_run_has() -> None:
    figures = {"stall_s": 0.5, "remote_s": 3.0, "losses_per_h": 0.5}
    fixed = times_of(parse_policy("every 196s or at notice:margin=2.0"), **figures)
    assert (fixed.every_s, fixed.at_notice) == (196.0, NoticePolicy(margin=2.0))
    assert fixed.saves == FixedInterval(interval_h=196 / HOUR_S, stall_h=0.5 / HOUR_S, remote_h=3.0 / HOUR_S)
    assert times_of(parse_policy("every 60s or every 90s"), **figures).every_s == 60.0
    assert times_of(parse_policy("every 60s"), **figures).at_notice is None
    young = times_of(YoungDaly(), **figures).every_s
    assert young == times_of(YoungDaly(hazard_per_s=0.5 / HOUR_S), **figures).every_s == pytest.approx(84.6, abs=0.5)
    law = YoungDalyByAge(short_share=0.6, short_s=1800.0, long_s=28800.0)
    by_age = times_of(AnyOf(law, AtNotice()), **figures)
    assert by_age.every_s is None
    own = intervals_by_age(law, stall_s=0.5, remote_s=3.0)
    assert np.asarray(by_age.saves.safe([0.5, 2.0])).tolist() == own.safe([0.5, 2.0]).tolist()
    assert times_of(AtNotice(), **figures).saves == NeverSave(save_h=3.5 / HOUR_S)
    with pytest.raises(UsageError, match="cannot be simulated: give one by time"):
        times_of(EverySteps(3), **figures)


def test_clouds_promise_what_their_manuals_say_and_others_nothing() -> None:
    assert [notice_s(cloud) for cloud in ("aws", "gcp", "azure", "lambda")] == [120.0, 30.0, 30.0, 0.0]
    assert notice_s("gcp") == PREEMPTED_S


@pytest.mark.parametrize("wrong", [{"seconds": -1.0}, {"seconds": 30.0, "share": 1.1}])
def test_impossible_notices_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="must be"):
        Notices(**wrong)


def test_every_strategy_of_a_backtest_with_checkpoints_uses_notices() -> None:
    market, job = bulk_market(5, zones=3), replace(JOB, work_h=12.0)
    names = ("durable", "tiering", "tiering+move", "planned")
    usual, told = (
        backtest(market, job, starts=20, strategies=names, rates=rates).rows
        for rates in (Rates(), Rates(notices=1.0, notice_s=120.0))
    )
    for before, after in zip(usual, told, strict=True):
        assert before.outcomes is not None
        assert after.outcomes is not None
        assert after.outcomes.lost_h.mean() < 0.5 * before.outcomes.lost_h.mean(), after.name
