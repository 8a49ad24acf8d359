"""What to do with the seconds that are left: laws, and cases that people can check by hand."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepvm.errors import UsageError
from deepvm.policy import AtNotice, Moment, NoticeDecision, NoticePolicy, at_notice

WORTH = ("rely", "finish", "save")
lefts = st.floats(0, 300)
policies = st.builds(NoticePolicy, margin=st.floats(1, 4), keep_s=st.floats(0, 20))
facts = st.fixed_dictionaries(
    {
        "unsaved_steps": st.integers(0, 1000),
        "save_s": st.none() | st.floats(0, 200),
        "under_way_for_s": st.none() | st.floats(0, 200),
    }
)


def worth(decision: NoticeDecision) -> int:
    return WORTH.index(decision.choice)


def work_s(decision: NoticeDecision, facts: dict[str, Any]) -> float:
    """What is expected to be done until the choice is carried out."""
    under_way_for_s = facts["under_way_for_s"]
    rest_s = 0.0 if under_way_for_s is None else max(0.0, facts["save_s"] - under_way_for_s)
    return {"rely": 0.0, "finish": rest_s, "save": rest_s + facts["save_s"]}[decision.choice]


@given(lefts, facts, policies)
def test_nothing_is_begun_that_cannot_be_finished(left_s: float, facts: dict[str, Any], policy: NoticePolicy) -> None:
    decision = at_notice(seconds_left=left_s, policy=policy, **facts)
    if decision.choice != "rely" and facts["save_s"] is not None:
        assert policy.margin * work_s(decision, facts) + policy.keep_s <= left_s + 1e-6
    if left_s < policy.keep_s:
        assert decision.choice == "rely"


@given(lefts, facts, policies)
def test_nothing_is_done_for_nothing(left_s: float, facts: dict[str, Any], policy: NoticePolicy) -> None:
    choice = at_notice(seconds_left=left_s, policy=policy, **facts).choice
    assert choice != "save" or facts["unsaved_steps"] > 0
    assert choice != "finish" or facts["under_way_for_s"] is not None


@given(lefts, lefts, facts, policies)
def test_more_time_never_saves_less(left_s: float, more_s: float, facts: dict[str, Any], policy: NoticePolicy) -> None:
    less, more = (at_notice(seconds_left=s, policy=policy, **facts) for s in (left_s, left_s + more_s))
    assert worth(more) >= worth(less)


@given(lefts, facts, st.floats(0, 1), policies)
def test_a_faster_network_never_saves_less(
    left_s: float, facts: dict[str, Any], factor: float, policy: NoticePolicy
) -> None:
    if facts["save_s"] is None:
        return
    faster = {**facts, "save_s": facts["save_s"] * factor}
    slow, fast = (at_notice(seconds_left=left_s, policy=policy, **f) for f in (facts, faster))
    assert worth(fast) >= worth(slow)


@given(lefts, facts, policies, st.floats(0, 3), st.floats(0, 20))
def test_a_more_careful_policy_never_dares_more(
    left_s: float, facts: dict[str, Any], policy: NoticePolicy, margin: float, keep_s: float
) -> None:
    careful = NoticePolicy(margin=policy.margin + margin, keep_s=policy.keep_s + keep_s)
    usual, most_careful = (at_notice(seconds_left=left_s, policy=p, **facts) for p in (policy, careful))
    assert worth(most_careful) <= worth(usual)


@given(facts, policies)
def test_without_a_time_whatever_would_be_lost_is_saved(facts: dict[str, Any], policy: NoticePolicy) -> None:
    choice = at_notice(seconds_left=None, policy=policy, **facts).choice
    if facts["under_way_for_s"] is not None:
        assert choice == "finish"
    else:
        assert choice == ("save" if facts["unsaved_steps"] else "rely")


@given(st.none() | lefts, facts)
def test_the_reason_is_one_line(left_s: float | None, facts: dict[str, Any]) -> None:
    why = at_notice(seconds_left=left_s, **facts).why
    assert why == why.strip()
    assert len(why.splitlines()) == 1


@pytest.mark.parametrize(
    ("left_s", "unsaved", "under_way_for_s", "choice", "words"),
    [
        (90, 7, None, "save", "saving 7 steps should take 10 s, and 90 s are left"),
        (15.5, 1, None, "save", "saving 1 step should take 10 s"),
        (15.4, 1, None, "rely", "15.4 s are left and a save needs 10 s: 1.5 times that and 500 ms"),
        (120, 0, None, "rely", "the last checkpoint has this step"),
        (23.1, 3, 5.0, "save", "saving 3 steps should take 10 s after the 5 s of the save under way"),
        (22.9, 3, 5.0, "finish", "take 5 s more, and 22.9 s are left, too few for another of 10 s"),
        (90, 0, 5.0, "finish", "the save under way should take 5 s more, and 90 s are left"),
        (7.9, 3, 5.0, "rely", "the save under way needs 5 s more"),
        (0.4, 3, 9.9, "rely", "too late to save"),
    ],
)
def test_seconds_left_are_weighed_against_a_save_of_ten_seconds(
    left_s: float, unsaved: int, under_way_for_s: float | None, choice: str, words: str
) -> None:
    found = at_notice(seconds_left=left_s, unsaved_steps=unsaved, save_s=10.0, under_way_for_s=under_way_for_s)
    assert found.choice == choice
    assert words in found.why


def test_senseless_policies_cannot_be_made() -> None:
    for settings in ({"margin": 0.9}, {"margin": math.nan}, {"keep_s": -1.0}, {"keep_s": math.inf}):
        with pytest.raises(UsageError):
            NoticePolicy(**settings)
    with pytest.raises(UsageError):
        AtNotice(again_after_s=0)


# --- as a policy for saving ---------------------------------------------------------------------------------------

NOTICED = Moment(step=9, now_s=100, last_saved_step=5, last_saved_s=40, notice_s_left=120)


def test_a_notice_makes_a_save_due_at_once_and_again_later() -> None:
    assert AtNotice().due(NOTICED)
    assert not AtNotice().due(dataclasses.replace(NOTICED, notice_s_left=None))
    saved = dataclasses.replace(NOTICED, last_saved_step=9, last_saved_s=100, step=10)
    assert not AtNotice().due(dataclasses.replace(saved, now_s=110, notice_s_left=110))
    assert AtNotice().due(dataclasses.replace(saved, now_s=116, notice_s_left=104))
    assert AtNotice().due(dataclasses.replace(saved, now_s=103, notice_s_left=2))
    assert not AtNotice().due(dataclasses.replace(NOTICED, step=5))


def test_a_save_that_cannot_be_finished_is_not_begun() -> None:
    assert AtNotice().due(dataclasses.replace(NOTICED, save_took_s=70))
    assert not AtNotice().due(dataclasses.replace(NOTICED, save_took_s=90))
    assert not AtNotice().due(dataclasses.replace(NOTICED, save_cost_s=90))  # it takes that much at least
    assert AtNotice(policy=NoticePolicy(margin=1)).due(dataclasses.replace(NOTICED, save_took_s=90))


def test_no_save_is_begun_over_one_that_is_under_way() -> None:
    assert not AtNotice().due(dataclasses.replace(NOTICED, save_took_s=1, under_way_for_s=0.5))


@given(st.floats(0.5, 120), st.floats(0.01, 30), st.floats(0.05, 5))
def test_until_the_end_only_steps_are_lost_for_which_there_was_no_time(
    notice_s: float, save_s: float, step_s: float
) -> None:
    """A machine's last seconds, step by step."""
    policy, now_s, step, saved_step, saved_s, begun_s = AtNotice(), 0.0, 100, 0, -600.0, None
    begun = []
    while now_s <= notice_s:
        if begun_s is not None and now_s >= begun_s + save_s:
            begun_s = None
        now = Moment(
            step=step,
            now_s=now_s,
            last_saved_step=saved_step,
            last_saved_s=saved_s,
            notice_s_left=notice_s - now_s,
            save_took_s=save_s,
            under_way_for_s=None if begun_s is None else now_s - begun_s,
        )
        if policy.due(now):
            saved_step, saved_s, begun_s = step, now_s, now_s
            begun.append(now_s)
        step, now_s = step + 1, now_s + step_s
    assert all(at_s + save_s <= notice_s for at_s in begun)
    needed_s = 1.5 * save_s + 0.5
    if notice_s > needed_s:
        assert begun  # at the very first step
        assert begun[0] == 0
        # the last chance is taken, but for a save that was under way and the step that it falls into
        assert notice_s - begun[-1] <= needed_s + save_s + 2 * step_s + 1e-6
    else:
        assert not begun or notice_s == pytest.approx(needed_s)
