"""How long a run's steps, saves, starts and restores take, from its events."""

from __future__ import annotations

from typing import Any

from deepvm.events import Event
from deepvm.runtime.supervise.moves.pace import Pace


def observe(pace: Pace, at_s: float, kind: str, **data: Any) -> None:
    pace.observe(Event(at_s=at_s, kind=kind, machine="worker/0", data=data))


def test_a_step_takes_the_median_of_the_largest_group() -> None:
    pace = Pace()
    assert pace.step_s is None
    for at_s, seconds, world_size in ((1, 9.0, 2), (2, 1.0, 2), (3, 2.0, 2), (4, 6.0, 2), (5, 50.0, 1)):
        observe(pace, at_s, "step", seconds=seconds, world_size=world_size)
    assert pace.step_s == 2.0, "of 1, 2 and 6: the first is not typical, the last of a smaller group"
    observe(pace, 6, "step", seconds=0.5, world_size=3)
    assert pace.step_s == 0.5
    assert pace.trained_s == 5


def test_a_start_is_from_the_last_machine_to_the_first_step_without_the_restore() -> None:
    pace = Pace()
    observe(pace, 10, "machine-up")
    observe(pace, 12, "machine-up")
    observe(pace, 15, "restored", seconds=2.0)
    observe(pace, 20, "step", seconds=1.0)
    assert pace.start_s == 20 - 1 - 2 - 12
    assert pace.restore_s == 2.0
    observe(pace, 30, "group")
    assert pace.trained_s is None
    observe(pace, 33, "step", seconds=1.0)
    assert (pace.start_s, pace.restore_s) == (5, 2.0), "no machine came up, and nothing was restored"


def test_a_save_and_its_stall_are_those_of_rank_0_and_stand_for_a_restore() -> None:
    pace = Pace()
    assert (pace.save_s, pace.stall_s, pace.restore_s) == (0, 0, 0)
    observe(pace, 1, "save", state="remote", rank=0, seconds=3.0, stall_s=0.25)
    observe(pace, 1, "save", state="remote", rank=1, seconds=9.0, stall_s=9.0)
    observe(pace, 1, "save", state="durable", rank=0, seconds=9.0, stall_s=9.0)
    assert (pace.save_s, pace.stall_s, pace.restore_s) == (3.0, 0.25, 3.0)
