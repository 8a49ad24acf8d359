"""Intervals by age: the policy of a run and the simulator agree, and old spells waste less."""

from __future__ import annotations

import numpy as np
import pytest

from deepvm.errors import UsageError
from deepvm.market.hazard import AlternatingSpells, Hyperexponential, Observed, SpellPair
from deepvm.policy import Moment
from deepvm.policy.saving import daly_interval_s
from deepvm.simulate.by_age import age_waste, intervals_by_age, policy_by_age

LAW = SpellPair(
    up=Hyperexponential(weights=(0.65, 0.35), means_h=(0.4, 10.0)),
    down=Hyperexponential(weights=(0.7, 0.3), means_h=(0.4, 3.0)),
)


def zones(count: int = 3, ticks: int = 6000) -> list[Observed]:
    model = AlternatingSpells(by_machines={1: LAW})
    rows = model.sample(np.random.default_rng(3), zones=count, ticks=ticks, tick_s=300.0)
    return [Observed(zone=f"z{i}", up=row, tick_s=300.0, machines=1) for i, row in enumerate(rows)]


def test_the_simulator_saves_when_the_policy_of_a_run_is_due() -> None:
    policy = policy_by_age(LAW.up)
    saves = intervals_by_age(policy, stall_s=2.0)
    now_s = last_s = 0.0
    for interval_h in saves.interval_h[:50].tolist():
        due_s = last_s + interval_h * 3600
        for shift, expected in ((-0.01, False), (0.01, True)):
            now_s = due_s + shift
            assert policy.due(Moment(step=9, now_s=now_s, last_saved_s=last_s, save_cost_s=2.0)) is expected
        last_s = due_s + 2.0
    assert (np.diff(saves.interval_h) >= -1e-12).all()


def test_a_law_of_one_phase_has_one_interval() -> None:
    flat = policy_by_age(Hyperexponential(weights=(1.0,), means_h=(5.0,)))
    saves = intervals_by_age(flat, stall_s=5.0, remote_s=3.0)
    assert len(saves.interval_h) == 1
    assert saves.interval_h[0] * 3600 == pytest.approx(daly_interval_s(5.0, 1 / 18000))
    three = Hyperexponential(weights=(0.2, 0.3, 0.5), means_h=(1.0, 2.0, 3.0))
    with pytest.raises(UsageError, match="one or two phases"):
        policy_by_age(three)


@pytest.mark.parametrize("stall_s", [0.1, 5.0, 30.0])
def test_intervals_by_age_waste_less_on_later_spells(stall_s: float) -> None:
    waste = age_waste(zones(), 1, stall_s)
    assert waste.saved > 0.05
    assert 0 < waste.by_age_h < waste.young_daly_h


def test_saves_that_cost_nothing_are_limited_by_the_shortest_interval() -> None:
    saves = intervals_by_age(policy_by_age(LAW.up, least_s=1.0), stall_s=0.0)
    assert saves.interval_h.tolist() == [1 / 3600]
