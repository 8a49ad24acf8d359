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
    NoticePolicy,
    Retention,
    SavePolicy,
    YoungDaly,
    YoungDalyByAge,
    daly_interval_s,
    parse_policy,
)

seconds = st.floats(1e-3, 1e6)
leaves = st.one_of(
    st.builds(EverySteps, st.integers(1, 10**6)),
    st.builds(EverySeconds, st.floats(1e-3, 1e6)),
    st.just(YoungDaly()),
    st.just(AtNotice()),
    st.builds(
        lambda share, short, ratio: YoungDalyByAge(short_share=share, short_s=short, long_s=short * ratio),
        st.floats(0, 1),
        st.floats(1, 1e5),
        st.floats(1, 100),
    ),
)
conjunctions = st.one_of(leaves, st.lists(leaves, min_size=2, max_size=3).map(lambda ps: AllOf(*ps)))
policies = st.one_of(conjunctions, st.lists(conjunctions, min_size=2, max_size=3).map(lambda ps: AnyOf(*ps)))
positive = st.floats(0, exclude_min=True, allow_infinity=False)


@st.composite
def young_dalys(draw: st.DrawFn) -> YoungDaly:
    least_s, most_s = sorted((draw(positive), draw(positive)))
    hazard = draw(st.none() | st.floats(0, allow_infinity=False))
    return YoungDaly(hazard_per_s=hazard, fallback_s=draw(positive), least_s=least_s, most_s=most_s)


any_leaves = st.one_of(
    st.builds(EverySteps, st.integers(1)),
    st.builds(EverySeconds, positive),
    st.just(YoungDaly()),
    st.builds(YoungDaly, hazard_per_s=st.floats(0, allow_infinity=False)),
    young_dalys(),
    st.just(AtNotice()),
    st.builds(
        AtNotice,
        st.floats(0, exclude_min=True),
        st.builds(NoticePolicy, margin=st.floats(1, allow_infinity=False), keep_s=st.floats(0, allow_infinity=False)),
    ),
)
any_policies = st.recursive(  # all that can be made
    any_leaves,
    lambda parts: st.builds(
        lambda kind, of: kind(*of), st.sampled_from([AnyOf, AllOf]), st.lists(parts, min_size=1, max_size=3)
    ),
    max_leaves=12,
)


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


@given(any_policies)
def test_every_policy_is_parsed_back_from_its_text(policy: SavePolicy) -> None:
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


def test_young_daly_never_saves_more_often_than_a_save_becomes_safe() -> None:
    for policy in (YoungDaly(hazard_per_s=1 / 60), YoungDalyByAge(short_share=0.5, short_s=60, long_s=600)):
        now = Moment(step=5, now_s=30.0, save_cost_s=0.1)
        assert policy.interval_s(now) < 20
        assert policy.interval_s(dataclasses.replace(now, save_took_s=25.0)) == 25.0


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
        ("10 steps and (60s or at notice)", EverySteps(10) & (EverySeconds(60) | AtNotice())),
        ("young-daly:mtbf=2h", YoungDaly(hazard_per_s=1 / 7200)),
        (
            "young-daly:hazard=0.5/h, most=30min or at notice",
            YoungDaly(hazard_per_s=0.5 / 3600, most_s=1800) | AtNotice(),
        ),
        ("young-daly:fallback=5min,least=2s", YoungDaly(fallback_s=300, least_s=2)),
        ("at notice:again=never,margin=2,keep=1s", AtNotice(math.inf, NoticePolicy(margin=2, keep_s=1))),
        ("any of (60s)", AnyOf(EverySeconds(60))),
    ],
)
def test_policies_are_read_as_people_write_them(text: str, policy: SavePolicy) -> None:
    assert parse_policy(text) == policy


@pytest.mark.parametrize("text", ["every 0 steps", "every 0s", "young-daly:least=2h", "at notice:margin=0.5"])
def test_senseless_values_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_policy(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "a part is missing"),
        ("sometimes", "'sometimes' is unknown"),
        ("every", "'every' is unknown"),
        ("or", "'or' is unknown"),
        ("5 parsecs", "'5 parsecs' is unknown"),
        ("10 steps or", "a part is missing"),
        ("(60s", "a closing bracket is missing"),
        ("60s)", "')' is not expected"),
        ("60s (5 steps)", "'(' is not expected"),
        ("(" * 100_000, "it has too many brackets"),
        ("young-daly:", "'' is not a new NAME=VALUE"),
        ("young-daly:mtbf=2h,mtbf=3h", "'mtbf=3h' is not a new NAME=VALUE"),
        ("young-daly:mtbf=2h,hazard=1/h", "hazard and mtbf exclude each other"),
        ("young-daly:mtbf=0s", "mtbf must be above 0"),
        ("young-daly:mtbf=soon", "'soon' is not a duration"),
        ("young-daly:hazard=0.5", "hazard has no unit such as 0.5/h"),
        ("young-daly:hazard=often/h", "'often' is not a number"),
        ("young-daly:rate=1/h", "the option 'rate' is unknown, not one of hazard, mtbf, fallback, least, most"),
        ("at notice:twice=1", "the option 'twice' is unknown, not one of again, margin, keep"),
    ],
)
def test_other_texts_are_refused_with_the_reason_and_an_example(text: str, why: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_policy(text)
    assert f"is not a valid save policy ({why}): write it like every 100 steps" in str(refused.value)


def test_senseless_policies_cannot_be_made() -> None:
    for make in (
        lambda: EverySteps(0),
        lambda: EverySeconds(math.inf),
        lambda: YoungDaly(least_s=10, most_s=5),
        lambda: YoungDaly(hazard_per_s=-1),
        lambda: YoungDaly(fallback_s=math.inf),
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
    expired = retention.expired(sorted(set(steps)))
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


BY_AGE = YoungDalyByAge(short_share=0.6, short_s=1800, long_s=28800)


def test_intervals_lengthen_with_the_age_of_the_spell() -> None:
    ages = [0.0, 600.0, 3600.0, 36000.0]
    intervals = [BY_AGE.after_s(age, 1.0) for age in ages]
    assert intervals == sorted(intervals)
    assert intervals[-1] == pytest.approx(daly_interval_s(1.0, 1 / 28800), rel=1e-3)
    assert BY_AGE.hazard_per_s(0) == pytest.approx(0.6 / 1800 + 0.4 / 28800)
    assert BY_AGE.hazard_per_s(1e12) == pytest.approx(1 / 28800)


def test_one_phase_by_age_is_young_daly() -> None:
    flat = YoungDalyByAge(short_share=0.3, short_s=7200, long_s=7200)
    known = Moment(step=5, now_s=900, last_saved_s=500, save_cost_s=2.0, hazard_per_s=1 / 7200)
    assert flat.interval_s(known) == pytest.approx(YoungDaly().interval_s(known))
    assert YoungDalyByAge(short_share=1.0, short_s=60, long_s=7200).hazard_per_s(1e6) == pytest.approx(1 / 60)


def test_by_age_waits_for_a_measured_save_and_then_for_its_interval() -> None:
    assert BY_AGE.interval_s(Moment(step=1, now_s=1)) == 600
    wanted = BY_AGE.after_s(1000.0, 1.0)
    early, late = (
        Moment(step=9, now_s=1000 + wanted * share, last_saved_step=3, last_saved_s=1000.0, save_cost_s=1.0)
        for share in (0.99, 1.01)
    )
    assert (BY_AGE.due(early), BY_AGE.due(late), BY_AGE.deterministic) == (False, True, False)


@pytest.mark.parametrize(
    ("share", "short", "long"), [(1.1, 1, 2), (-0.1, 1, 2), (0.5, 0, 2), (0.5, 3, 2), (0.5, 1, math.inf)]
)
def test_phases_that_are_none_are_refused(share: float, short: float, long: float) -> None:
    with pytest.raises(UsageError, match="short_share"):
        YoungDalyByAge(short_share=share, short_s=short, long_s=long)


@pytest.mark.parametrize(
    "text",
    [
        "young-daly by age:share=2,short=1h,long=2h",
        "by age:share=0.5,short=1h",
        "by age:share=x,short=1h,long=2h",
        "by age",
    ],
)
def test_a_wrong_policy_by_age_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_policy(text)
