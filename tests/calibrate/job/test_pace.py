"""Which optimizer's step ends a training step, if there are several."""

from __future__ import annotations

import pytest

from deepvm.calibrate.job.pace import FORGOTTEN, Pace


class Optimizer:
    def __init__(self, name: str) -> None:
        self.name = name


D, G, E = Optimizer("d"), Optimizer("g"), Optimizer("e")


def ends(pace: Pace, *optimizers: Optimizer) -> str:
    """Names of optimizers in the order of their steps; in capitals where a training step ends."""
    return "".join(one.name.upper() if pace.stepped(one) else one.name for one in optimizers)


def test_a_single_optimizer_ends_every_step() -> None:
    pace = Pace()
    assert pace.is_new(D)
    assert ends(pace, D, D, D) == "DDD"
    assert not pace.is_new(D)
    pace.fix()
    assert ends(pace, D, D) == "DD"


def test_the_last_of_a_cycle_ends_it() -> None:
    pace = Pace()
    assert ends(pace, D, G, D, G) == "DGdG"  # until it is fixed, the fewest steps decide
    pace.fix()
    assert ends(pace, D, G, D, G) == "dGdG"
    assert pace.optimizers == [D, G]


def test_the_one_that_steps_least_often_ends_a_cycle_of_several_steps() -> None:
    pace = Pace()
    ends(pace, *[D, D, D, D, D, G] * 3)
    pace.fix()
    assert ends(pace, *[D, D, D, D, D, G] * 2) == "dddddGdddddG"


@pytest.mark.parametrize("steps", [3, 4, 5, 6, 7, 8])
def test_in_the_middle_of_a_cycle_counts_differ_by_one(steps: int) -> None:
    pace = Pace()
    ends(pace, *([D, G, E] * 4)[:steps])
    pace.fix()
    rest = ([D, G, E] * 6)[steps:]
    found = ends(pace, *rest)
    if steps >= 6:
        assert found == "".join("E" if one is E else one.name for one in rest)
    assert sum(letter.isupper() for letter in found) in (len(rest) // 3, len(rest) // 3 + 1)


def test_one_step_each_and_one_more_is_another_frequency_than_many() -> None:
    pace = Pace()
    ends(pace, D, G, D)  # one cycle and a half, or two steps of D for each of G
    pace.fix()
    assert ends(pace, G, D, G) == "GdG"


def test_an_optimizer_that_stopped_is_forgotten() -> None:
    pace = Pace()
    ends(pace, E, D, G)
    pace.fix()
    assert ends(pace, E) == "e"
    for _ in range(FORGOTTEN // 2):
        assert ends(pace, D, G) == "dG"
    assert pace.optimizers == [E, D, G]
    assert not pace.is_new(E)
    assert ends(pace, D) == "d"
    assert pace.optimizers == [D, G]
    assert pace.is_new(E)
    assert ends(pace, G, D, G) == "GdG"
    assert ends(pace, E) == "e"  # it is back, as a new one
    assert pace.optimizers == [D, G, E]


def test_if_the_one_that_ended_steps_has_stopped_the_slowest_does() -> None:
    pace = Pace()
    ends(pace, D, G)
    pace.fix()
    assert ends(pace, *[D] * FORGOTTEN) == "d" * FORGOTTEN
    assert ends(pace, D, D) == "DD"
    assert pace.optimizers == [D]


def test_counts_begin_again_when_another_joins() -> None:
    pace = Pace()
    ends(pace, D, D, D, D)
    pace.fix()
    pace.restart()
    assert ends(pace, D, G, D, G) == "DGdG"
    pace.fix()
    assert ends(pace, D, G, D, G) == "dGdG"


def test_one_that_joins_may_step_before_those_that_are_known() -> None:
    pace = Pace()
    ends(pace, D, D)
    pace.fix()
    pace.restart()
    assert ends(pace, G, D, G, D, G, D) == "gDgDgD"
    pace.fix()
    assert ends(pace, G, D, G, D) == "gDgD"
    assert pace.optimizers == [D, G]
