"""The simulator asks the save policy that a run holds."""

from __future__ import annotations

import numpy as np
import pytest

from deepvm.errors import UsageError
from deepvm.policy import EverySteps, Moment, YoungDaly, YoungDalyByAge, parse_policy
from deepvm.simulate.by_age import intervals_by_age
from deepvm.simulate.saves import FixedInterval, PolicySaves

HOUR_S = 3600.0


def saves(text: str, **more: float) -> PolicySaves:
    figures = {"work_h": 100 / HOUR_S, "step_h": 1 / HOUR_S, "stall_h": 0.25 / HOUR_S, "remote_h": 0.5 / HOUR_S, **more}
    return PolicySaves(policy=parse_policy(text), **figures)


def seconds(hours: object) -> list[float]:
    return (np.asarray(hours) * HOUR_S).round(6).tolist()


def test_only_whole_steps_count_and_only_what_arrived_is_safe() -> None:
    found = saves("every 3 steps")
    at_s = np.array([0.0, 0.9, 3.0, 3.2, 3.7, 3.8, 6.4, 7.0, 7.1]) / HOUR_S
    assert seconds(found.trained(at_s)) == [0, 0, 3, 3, 3, 3, 6, 6, 6]
    assert seconds(found.safe(at_s)) == [0, 0, 0, 0, 0, 3, 3, 6, 6]
    assert seconds(found.needed(np.array([0.0, 1.0, 3.0, 4.0, 6.5]) / HOUR_S)) == [0, 1, 3, 4.25, 7.5]
    assert found.worst_loss_h * HOUR_S == pytest.approx(3.75)


def test_a_policy_by_time_waits_for_the_save_that_is_under_way() -> None:
    found = saves("every 2s", remote_h=4.4 / HOUR_S)
    at_s = np.array([6.5, 6.8, 11.8, 12.0]) / HOUR_S
    assert seconds(found.safe(at_s)) == [0, 2, 2, 7], "the saves of steps 4 and 6 would be skipped"


@pytest.mark.parametrize("policy", [YoungDaly(hazard_per_s=1 / 600), YoungDaly(hazard_per_s=0.01, least_s=20.0)])
def test_with_short_steps_it_is_the_fixed_interval_of_the_policy(policy: YoungDaly) -> None:
    stall_s, step_s = 0.3, 0.01
    found = PolicySaves(policy=policy, work_h=0.1, step_h=step_s / HOUR_S, stall_h=stall_s / HOUR_S)
    interval_s = policy.interval_s(Moment(step=1, now_s=0.0, save_cost_s=stall_s))
    fixed = FixedInterval(interval_h=interval_s / HOUR_S, stall_h=stall_s / HOUR_S)
    for elapsed_h in (0.0, 0.011, 0.03, 0.07):
        assert found.safe(elapsed_h) == pytest.approx(fixed.safe(elapsed_h), abs=interval_s / HOUR_S + 1e-9)
        assert found.trained(elapsed_h) == pytest.approx(fixed.trained(elapsed_h), abs=2 * step_s / HOUR_S)


def test_a_policy_by_age_saves_at_the_ages_that_its_intervals_say() -> None:
    policy = YoungDalyByAge(short_share=0.7, short_s=200.0, long_s=20_000.0)
    steps = PolicySaves(policy=policy, work_h=1.0, step_h=0.1 / HOUR_S, stall_h=1 / HOUR_S)
    smooth = intervals_by_age(policy, stall_s=1.0)
    ages_h = np.linspace(0.02, 1.0, 20)
    assert steps.trained(ages_h) == pytest.approx(smooth.trained(ages_h), abs=0.02)


def test_work_of_too_many_steps_is_refused() -> None:
    with pytest.raises(UsageError, match="steps"):
        PolicySaves(policy=EverySteps(10), work_h=1e6, step_h=1e-4)
