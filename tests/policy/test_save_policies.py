"""When to save and what to keep: laws."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepvm.errors import UsageError
from deepvm.policy import (
    AllOf,
    AnyOf,
    AtNotice,
    EverySeconds,
    EverySteps,
    Moment,
    Retention,
    SavePolicy,
    YoungDaly,
    daly_interval_s,
    parse_policy,
)

seconds = st.floats(1e-3, 1e6)
leaves = st.one_of(
    st.builds(EverySteps, st.integers(1, 10**6)),
    st.builds(EverySeconds, st.floats(1e-3, 1e6)),
    st.just(YoungDaly()),
    st.just(AtNotice()),
)
conjunctions = st.one_of(leaves, st.lists(leaves, min_size=2, max_size=3).map(lambda ps: AllOf(*ps)))
policies = st.one_of(conjunctions, st.lists(conjunctions, min_size=2, max_size=3).map(lambda ps: AnyOf(*ps)))


@st.composite
def moments(draw: st.DrawFn) -> Moment:
    last_step, last_s = draw(st.integers(0, 10**6)), draw(st.floats(0, 1e6))
    return Moment(
        step=last_step + draw(st.integers(1, 10**4)),
        now_s=last_s + draw(st.floats(0, 1e5)),
        last_saved_step=last_step,
        last_saved_s=last_s,
        notice_s_left=draw(st.none() | st.floats(0, 300)),
        save_cost_s=draw(st.none() | st.floats(0, 1e4)),
        hazard_per_s=draw(st.none() | st.floats(0, 1)),
        save_took_s=draw(st.none() | st.floats(0, 300)),
        under_way_for_s=draw(st.none() | st.floats(0, 300)),
    )


def just_saved(now: Moment) -> Moment:
    return dataclasses.replace(now, last_saved_step=now.step, last_saved_s=now.now_s)


@given(policies, policies, moments())
def test_or_and_and_mean_what_they_say(a: SavePolicy, b: SavePolicy, now: Moment) -> None:
    assert (a | b).due(now) == (a.due(now) or b.due(now))
    assert (a & b).due(now) == (a.due(now) and b.due(now))
    assert (a | b).deterministic == (a.deterministic and b.deterministic) == (a & b).deterministic


@given(leaves, leaves, leaves)
def test_composition_is_flat(a: SavePolicy, b: SavePolicy, c: SavePolicy) -> None:
    assert (a | b) | c == a | (b | c) == AnyOf(a, b, c)
    assert (a & b) & c == a & (b & c) == AllOf(a, b, c)


@given(policies)
def test_a_policy_is_read_back_from_its_text(policy: SavePolicy) -> None:
    assert parse_policy(str(policy)) == policy


@given(policies, moments(), moments())
def test_deterministic_policies_look_at_the_step_alone(policy: SavePolicy, one: Moment, other: Moment) -> None:
    if policy.deterministic:
        assert policy.due(one) == policy.due(dataclasses.replace(other, step=one.step))


@given(policies, moments())
def test_what_needs_a_clock_is_not_due_right_after_a_save(policy: SavePolicy, now: Moment) -> None:
    if not any(isinstance(p, EverySteps) for p in _parts(policy)):
        assert not policy.due(just_saved(now))


def _parts(policy: SavePolicy) -> list[SavePolicy]:
    if isinstance(policy, (AnyOf, AllOf)):
        return [leaf for part in policy.policies for leaf in _parts(part)]
    return [policy]


@given(st.integers(1, 1000), st.integers(1, 3000))
def test_every_n_steps_saves_once_in_n(steps: int, upto: int) -> None:
    policy = EverySteps(steps)
    saved = [
        step for step in range(upto + 1) if policy.due(Moment(step=step, now_s=0, last_saved_step=0, last_saved_s=0))
    ]
    assert saved == list(range(steps, upto + 1, steps))


@given(seconds, moments(), st.floats(0, 1e5))
def test_once_due_by_time_it_stays_due_until_saved(every_s: float, now: Moment, later_s: float) -> None:
    later = dataclasses.replace(now, step=now.step + 1, now_s=now.now_s + later_s)
    for policy in (EverySeconds(every_s), YoungDaly()):
        assert not policy.due(now) or policy.due(later)


# --- Young and Daly -----------------------------------------------------------------------------------------------


def expected_slowdown(interval_s: float, cost_s: float, hazard: float) -> float:
    """Daly's exact model for exponential failures, without the restart's factor, which the interval cannot change."""
    return math.expm1((interval_s + cost_s) * hazard) / (interval_s * hazard)


@given(st.floats(1e-3, 1e3), st.floats(1e-7, 1e-2), st.floats(0.01, 100))
def test_no_other_interval_loses_noticeably_less(cost_s: float, hazard: float, factor: float) -> None:
    if cost_s * hazard > 0.5:  # saving takes as long as a machine lives: no interval is good
        return
    best = daly_interval_s(cost_s, hazard)
    other = best * factor
    if (other + cost_s) * hazard < 500:
        assert expected_slowdown(best, cost_s, hazard) <= 1.001 * expected_slowdown(other, cost_s, hazard)


@given(st.floats(1e-3, 10), st.floats(1e-9, 1e-6))
def test_cheap_saves_follow_young(cost_s: float, hazard: float) -> None:
    assert daly_interval_s(cost_s, hazard) == pytest.approx(math.sqrt(2 * cost_s / hazard), rel=0.01)


@given(st.floats(0, 1e4), st.floats(0, 1e4), st.floats(0, 1))
def test_dearer_saves_are_rarer_up_to_the_mean_life(cost_s: float, more_s: float, hazard: float) -> None:
    if hazard > 0 and (cost_s + more_s) * hazard <= 0.5:
        assert daly_interval_s(cost_s, hazard) <= daly_interval_s(cost_s + more_s, hazard) + 1e-9
    assert daly_interval_s(cost_s, hazard) >= 0


@given(moments(), st.floats(0, 1))
def test_the_interval_keeps_its_bounds(now: Moment, hazard: float) -> None:
    policy = YoungDaly(hazard_per_s=hazard, least_s=5, most_s=900)
    assert 5 <= policy.interval_s(now) <= 900


def test_the_interval_falls_back_until_measured() -> None:
    now = Moment(step=1, now_s=700)
    assert not YoungDaly().due(dataclasses.replace(now, now_s=599))
    assert YoungDaly().interval_s(now) == 600
    assert YoungDaly().due(now)
    measured = dataclasses.replace(now, save_cost_s=0.5, hazard_per_s=1 / 7200)
    assert YoungDaly().interval_s(measured) == pytest.approx(math.sqrt(2 * 0.5 * 7200), rel=0.01)
    assert YoungDaly(hazard_per_s=0).interval_s(measured) == 3600


# --- texts and bounds ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("every 100 steps", EverySteps(100)),
        ("100 steps", EverySteps(100)),
        ("every step", EverySteps(1)),
        ("every 60s", EverySeconds(60)),
        ("5min", EverySeconds(300)),
        ("100 steps or 60s", EverySteps(100) | EverySeconds(60)),
        ("Every 100 Steps | at notice", EverySteps(100) | AtNotice()),
        ("young-daly", YoungDaly()),
        ("10 steps and 60s or at notice", (EverySteps(10) & EverySeconds(60)) | AtNotice()),
    ],
)
def test_policies_are_read_as_people_write_them(text: str, policy: SavePolicy) -> None:
    assert parse_policy(text) == policy


@pytest.mark.parametrize(
    "text", ["", "sometimes", "every", "every 0 steps", "every 0s", "or", "5 parsecs", "10 steps or"]
)
def test_other_texts_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError):
        parse_policy(text)


def test_senseless_policies_cannot_be_made() -> None:
    for make in (
        lambda: EverySteps(0),
        lambda: EverySeconds(math.inf),
        lambda: YoungDaly(least_s=10, most_s=5),
        lambda: YoungDaly(hazard_per_s=-1),
        lambda: AnyOf(),
        lambda: Retention(keep_last=0),
        lambda: Retention(keep_every=0),
    ):
        with pytest.raises(UsageError):
            make()


# --- retention ----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 1000)), st.integers(1, 10), st.none() | st.integers(1, 50))
def test_retention_keeps_the_newest_and_every_nth(steps: list[int], keep_last: int, keep_every: int | None) -> None:
    retention = Retention(keep_last=keep_last, keep_every=keep_every)
    expired = retention.expired(steps)
    kept = sorted(set(steps) - set(expired))
    assert expired == sorted(set(expired))
    assert kept[-keep_last:] == sorted(set(steps))[-keep_last:]
    if keep_every is None:
        assert len(kept) == min(keep_last, len(set(steps)))
    else:
        assert all(step in kept for step in steps if step % keep_every == 0)
    assert retention.expired(kept) == []


@pytest.mark.parametrize("policy", [EverySeconds(10), YoungDaly(fallback_s=10)], ids=str)
def test_time_alone_is_no_reason_to_save_what_is_saved(policy: SavePolicy) -> None:
    unchanged = Moment(step=5, now_s=1000, last_saved_step=5, last_saved_s=0)

    assert not policy.due(unchanged)
    assert policy.due(dataclasses.replace(unchanged, step=6))
