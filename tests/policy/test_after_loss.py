"""What the trainers that are left do after a loss: laws and texts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepvm.errors import UsageError
from deepvm.policy import AfterLoss, parse_after_loss

waits = st.just(math.inf) | st.floats(0, 1e6)
rules = st.builds(AfterLoss, wait_s=waits, least=st.integers(1, 50))
counts = st.integers(0, 60)
seconds = st.floats(0, 2e6)


@given(rules, counts, st.integers(1, 60), seconds)
def test_a_group_forms_whole_or_after_the_wait_with_enough(
    rule: AfterLoss, joined: int, wanted: int, waited_s: float
) -> None:
    whole = joined >= wanted
    enough = joined >= rule.least and waited_s >= rule.wait_s
    assert rule.decide(joined, wanted, waited_s) == (whole or enough)


@given(rules, counts, counts, st.integers(1, 60), seconds, seconds)
def test_more_trainers_or_more_time_never_forbid_it(
    rule: AfterLoss, joined: int, more: int, wanted: int, waited_s: float, more_s: float
) -> None:
    if rule.decide(joined, wanted, waited_s):
        assert rule.decide(joined + more, wanted, waited_s + more_s)


@given(rules, st.integers(0, 60), seconds)
def test_nobody_is_no_group(rule: AfterLoss, wanted: int, waited_s: float) -> None:
    assert not rule.decide(0, wanted, waited_s)


@given(rules)
def test_a_rule_is_read_back_from_its_text(rule: AfterLoss) -> None:
    read = parse_after_loss(str(rule))
    assert read.wait_s == rule.wait_s
    assert read.least == (rule.least if math.isfinite(rule.wait_s) else 1)  # of a wait without end, none is smaller


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("wait", AfterLoss(wait_s=math.inf)),
        ("wait:30s", AfterLoss(wait_s=30)),
        ("wait:2min:4", AfterLoss(wait_s=120, least=4)),
        ("shrink", AfterLoss(wait_s=0)),
        (" Shrink:2 ", AfterLoss(wait_s=0, least=2)),
    ],
)
def test_rules_are_read_as_people_write_them(text: str, rule: AfterLoss) -> None:
    assert parse_after_loss(text) == rule


@pytest.mark.parametrize(
    "text",
    [
        *("", "grow", "wait:", "wait:30", "wait:30s:", "wait:30s:0", "wait:30s:2:3", "wait:-1s", "wait:5 parsecs"),
        *("shrink:", "shrink:0", "shrink:-1", "shrink:30s", "shrink:2:3", "shrink:1.5"),
    ],
)
def test_other_texts_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="write it like wait, wait:30s"):
        parse_after_loss(text)


@pytest.mark.parametrize("settings", [{"wait_s": -1.0}, {"wait_s": math.nan}, {"least": 0}])
def test_senseless_rules_cannot_be_made(settings: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        AfterLoss(**settings)  # type: ignore[arg-type]
