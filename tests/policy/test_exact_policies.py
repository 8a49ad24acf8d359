"""What policies are written like, and the intervals that they choose, in figures."""

from __future__ import annotations

import math

import pytest

from deepvm.errors import UsageError
from deepvm.policy import (
    AfterLoss,
    AllOf,
    AnyOf,
    AtNotice,
    EverySeconds,
    EverySteps,
    Moment,
    NoticePolicy,
    Retention,
    SavePolicy,
    YoungDaly,
    YoungDalyByAge,
    at_notice,
    daly_interval_s,
    parse_after_loss,
    parse_policy,
)

PHASES = {"short_share": 0.6, "short_s": 1800.0, "long_s": 28800.0}


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (EverySteps(7), "every 7 steps"),
        (EverySeconds(60), "every 60s"),
        (EverySeconds(0.25), "every 0.25s"),
        (YoungDaly(), "young-daly"),
        (YoungDaly(hazard_per_s=0.5), "young-daly:hazard=0.5/s"),
        (YoungDaly(fallback_s=601, least_s=2, most_s=3601), "young-daly:fallback=601s,least=2s,most=3601s"),
        (YoungDaly(least_s=0.5), "young-daly:least=0.5s"),
        (YoungDalyByAge(**PHASES), "young-daly by age:share=0.6,short=1800s,long=28800s"),
        (
            YoungDalyByAge(**PHASES, fallback_s=599, least_s=2, most_s=3599),
            "young-daly by age:share=0.6,short=1800s,long=28800s,fallback=599s,least=2s,most=3599s",
        ),
        (AtNotice(), "at notice"),
        (AtNotice(math.inf), "at notice:again=never"),
        (AtNotice(16, NoticePolicy(margin=2, keep_s=1)), "at notice:again=16s,margin=2.0,keep=1s"),
        (AnyOf(EverySteps(1), AllOf(EverySteps(2), AtNotice())), "every 1 steps or every 2 steps and at notice"),
        (AllOf(EverySteps(1), AnyOf(EverySteps(2), AtNotice())), "every 1 steps and (every 2 steps or at notice)"),
        (AnyOf(EverySteps(1)), "any of (every 1 steps)"),
        (AllOf(EverySteps(1)), "all of (every 1 steps)"),
    ],
)
def test_a_policy_is_written_with_what_is_not_usual_in_it(policy: SavePolicy, text: str) -> None:
    assert str(policy) == text
    assert parse_policy(text) == policy


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (AfterLoss(), "wait"),
        (AfterLoss(wait_s=30.0), "wait:30s"),
        (AfterLoss(wait_s=0.5, least=2), "wait:0.5s:2"),
        (AfterLoss(wait_s=0.0), "shrink"),
        (AfterLoss(wait_s=0.0, least=3), "shrink:3"),
    ],
)
def test_a_rule_for_losses_is_written_as_it_is_read(rule: AfterLoss, text: str) -> None:
    assert str(rule) == text
    assert parse_after_loss(text) == rule


@pytest.mark.parametrize(
    ("cost_s", "hazard_per_s", "interval_s"),
    [
        (1.0, 1 / 7200, 119.3342593),
        (30.0, 1 / 3600, 444.9731673),
        (30.0, 1 / 15, 15.0),
        (29.9, 1 / 15, 13.33330549),
        (5.0, 0.0, math.inf),
        (0.0, 0.5, 0.0),
    ],
)
def test_the_interval_is_dalys(cost_s: float, hazard_per_s: float, interval_s: float) -> None:
    assert daly_interval_s(cost_s, hazard_per_s) == pytest.approx(interval_s, rel=1e-8)


@pytest.mark.parametrize(("cost_s", "hazard_per_s"), [(-1.0, 0.5), (1.0, -0.5)])
def test_a_negative_cost_or_hazard_is_refused(cost_s: float, hazard_per_s: float) -> None:
    with pytest.raises(UsageError, match="neither may be negative"):
        daly_interval_s(cost_s, hazard_per_s)


def test_intervals_by_age_are_these() -> None:
    policy = YoungDalyByAge(**PHASES)
    ages = (-5.0, 0.0, 600.0, 3600.0, 36000.0)
    hazards = [0.000347222222, 0.000347222222, 0.00030723501, 0.000132124992, 3.47222278e-05]
    assert [policy.hazard_per_s(age) for age in ages] == pytest.approx(hazards, rel=1e-8)
    intervals = [106.49205, 106.543615, 113.493175, 175.05603, 338.079206]
    assert [policy.after_s(age, 2.0) for age in ages] == pytest.approx(intervals, rel=1e-8)
    assert YoungDalyByAge(**PHASES, least_s=200.0).after_s(0.0, 2.0) == 200.0
    assert YoungDalyByAge(**PHASES, most_s=30.0).after_s(0.0, 2.0) == 30.0
    only_short = YoungDalyByAge(short_share=1.0, short_s=60.0, long_s=600.0)
    assert only_short.hazard_per_s(1e9) == 1 / 60


def test_a_fallback_keeps_the_bounds_too() -> None:
    first = Moment(step=1, now_s=10.0)
    for kind, given in ((YoungDaly, {}), (YoungDalyByAge, PHASES)):
        assert kind(**given).interval_s(first) == 600.0
        assert kind(**given, fallback_s=7.0, least_s=9.0).interval_s(first) == 9.0
        assert kind(**given, fallback_s=7.0, most_s=5.0).interval_s(first) == 5.0


def test_a_moment_counts_from_the_last_save_or_the_start() -> None:
    now = Moment(step=9, now_s=30.0)
    assert (now.unsaved_steps, now.unsaved_s, now.save_s) == (9, 30.0, None)
    now = Moment(step=9, now_s=30.0, last_saved_step=4, last_saved_s=20.0, save_cost_s=0.5)
    assert (now.unsaved_steps, now.unsaved_s, now.save_s) == (5, 10.0, 0.5)
    assert Moment(step=9, now_s=30.0, save_cost_s=0.5, save_took_s=3.0).save_s == 3.0


def test_every_policy_is_due_at_its_limit_and_not_before() -> None:
    def now(**facts: float) -> Moment:
        return Moment(**{"step": 5, "now_s": 60.0, "last_saved_step": 4, "last_saved_s": 0.0, **facts})  # type: ignore[arg-type]

    assert EverySeconds(60).due(now())
    assert not EverySeconds(60).due(now(now_s=59.999))
    assert not EverySeconds(60).due(now(last_saved_step=5))
    assert YoungDaly(fallback_s=60).due(now())
    assert not YoungDaly(fallback_s=60).due(now(now_s=59.999))
    assert not YoungDaly(fallback_s=60).due(now(last_saved_step=5))
    assert not EverySteps(5).due(now(step=0))
    assert not EverySteps(5).due(now(step=6))
    assert EverySteps(5).due(now(step=10))


def test_a_notice_is_answered_once_by_a_save_and_again_before_it_is_too_late() -> None:
    def now(**facts: float | None) -> Moment:
        usual = {"step": 9, "now_s": 100.0, "last_saved_step": 5, "last_saved_s": 90.0, "notice_s_left": 60.0}
        return Moment(**{**usual, "save_took_s": 4.0, **facts})  # type: ignore[arg-type]

    policy = AtNotice()
    assert not policy.due(now())  # the last save is 10 s old
    assert policy.due(now(now_s=105.0))
    assert not policy.due(now(now_s=104.999))
    assert policy.due(now(noticed_s=95.0))
    assert not policy.due(now(noticed_s=90.0))
    assert policy.due(now(noticed_s=1.0, last_saved_s=None, last_saved_step=None))
    assert policy.due(now(notice_s_left=16.5))  # 1.5 × 4 + 0.5 s: 10 s are left after it
    assert not policy.due(now(notice_s_left=16.501))
    assert not policy.due(now(now_s=105.0, notice_s_left=0.0))
    assert not policy.due(now(now_s=105.0, under_way_for_s=1.0))
    assert policy.due(now(save_took_s=None, notice_s_left=10.0))
    assert not policy.due(now(save_took_s=None, notice_s_left=10.001))


def test_reasons_at_a_notice_are_whole_sentences() -> None:
    def why(**facts: float | None) -> tuple[str, str]:
        found = at_notice(**{"seconds_left": 60.0, "unsaved_steps": 3, "save_s": 4.0, **facts})  # type: ignore[arg-type]
        return found.choice, found.why

    assert why() == ("save", "saving 3 steps should take 4 s, and 60 s are left")
    assert why(unsaved_steps=0) == ("rely", "the last checkpoint has this step")
    assert why(seconds_left=0.5) == (
        "rely", "500 ms are left and a save needs 4 s: 1.5 times that and 500 ms would be safe, so the last checkpoint "
        "has to do",
    )  # fmt: skip
    assert why(seconds_left=0.49) == ("rely", "490 ms are left, which is too late to save")
    assert why(seconds_left=None) == ("save", "3 steps would be lost, and the time left is unknown")
    assert why(seconds_left=None, unsaved_steps=1) == ("save", "1 step would be lost, and the time left is unknown")
    assert why(save_s=None) == ("save", "3 steps would be lost, and no save was measured yet")
    assert why(save_s=None, under_way_for_s=1.0) == ("finish", "a save is under way, and no save was measured yet")
    assert why(seconds_left=None, under_way_for_s=1.0) == (
        "finish", "a save is under way, and the time left is unknown"
    )  # fmt: skip
    assert why(under_way_for_s=1.0) == (
        "save", "saving 3 steps should take 4 s after the 3 s of the save under way, and 60 s are left"
    )  # fmt: skip
    assert why(under_way_for_s=1.0, seconds_left=11.0)[0] == "save"
    assert why(under_way_for_s=1.0, seconds_left=10.9) == (
        "finish", "the save under way should take 3 s more, and 10.9 s are left, too few for another of 4 s"
    )  # fmt: skip
    assert why(under_way_for_s=1.0, seconds_left=5.0)[0] == "finish"
    assert why(under_way_for_s=1.0, seconds_left=4.9) == (
        "rely", "4.9 s are left and the save under way needs 3 s more: 1.5 times that and 500 ms would be safe, so the "
        "last checkpoint has to do",
    )  # fmt: skip
    assert why(under_way_for_s=9.0, seconds_left=0.6, unsaved_steps=0) == (
        "finish", "the save under way should take 0 ms more, and 600 ms are left"
    )  # fmt: skip


def test_two_checkpoints_are_kept_and_every_nth_for_ever() -> None:
    assert Retention().expired([1, 2, 3, 4]) == [1, 2]
    assert Retention().expired([1, 2]) == []
    assert Retention(keep_last=1, keep_every=3).expired([3, 4, 5, 6, 7]) == [4, 5]
    assert Retention(keep_last=1, keep_every=1).expired([3, 4, 5]) == []
