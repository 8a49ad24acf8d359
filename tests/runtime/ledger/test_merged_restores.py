"""Restores of several trainers as one."""

from __future__ import annotations

from typing import Any

import pytest

from deepvm.events import Event
from deepvm.runtime.ledger.recovery import merged_restores
from deepvm.runtime.ledger.steps import StepColumns


def restored(at_s: float, rank: int, seconds: float | None, **more: Any) -> Event:
    return Event(
        at_s=at_s, kind="restored", machine="worker/0", data={"step": 5, "rank": rank, "seconds": seconds, **more}
    )


@pytest.mark.parametrize(
    ("seconds", "slowest"),
    [
        ((5.0, 3.0), 5.0),
        ((3.0, 5.0), 5.0),
        ((None, 4.0), 4.0),
        ((4.0, None), 4.0),
        ((None, None), None),
        ((0.0, 0.0), 0.0),
    ],
)
def test_ranks_that_restore_together_are_one_restore_as_slow_as_the_slowest(
    seconds: tuple[float | None, float | None], slowest: float | None
) -> None:
    events = [restored(10.0 + rank, rank, taken) for rank, taken in enumerate(seconds)]
    (found,) = merged_restores(events, StepColumns().steps())

    assert found.seconds == slowest
    assert (found.first_s, found.at_s) == (10.0, 11.0)
    assert found.trainers == (("worker/0", 0), ("worker/0", 1))


def test_a_step_between_two_restores_parts_them() -> None:
    columns = StepColumns()
    columns.add(10.5, {"step": 6, "seconds": 0.1})

    assert len(merged_restores([restored(10.0, 0, 1.0), restored(11.0, 1, 1.0)], columns.steps())) == 2


def test_the_same_rank_twice_or_another_step_is_another_restore() -> None:
    steps = StepColumns().steps()

    assert len(merged_restores([restored(10.0, 0, 1.0), restored(11.0, 0, 1.0)], steps)) == 2
    assert len(merged_restores([restored(10.0, 0, 1.0), restored(11.0, 1, 1.0, step=6)], steps)) == 2
