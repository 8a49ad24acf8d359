"""What to do at a preemption notice: seconds left and measurements in, a decision out. Pure; the hub asks it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from deepvm.errors import UsageError
from deepvm.units import format_seconds

Choice = Literal["save", "finish", "rely"]


@dataclass(frozen=True, kw_only=True, slots=True)
class NoticeDecision:
    """``save``: start one after the save under way. ``finish``: only the save under way. ``rely``: on the last
    checkpoint. The machine may leave afterwards."""

    choice: Choice
    why: str  # a sentence


@dataclass(frozen=True, kw_only=True, slots=True)
class NoticePolicy:
    """How certain a save must be to end in time before it starts."""

    margin: float = 1.5  # a save may take this many times the expected time
    keep_s: float = 0.5  # for leaving the group, differing clocks and an early cloud

    def __post_init__(self) -> None:
        if not (math.isfinite(self.margin) and self.margin >= 1):
            raise UsageError(f"margin is {self.margin}: it must be at least 1, or saves would start in vain")
        if not (math.isfinite(self.keep_s) and self.keep_s >= 0):
            raise UsageError(f"keep_s is {self.keep_s}: it must be finite and not negative")

    def spare_s(self, seconds_left: float, work_s: float) -> float:
        """Return the seconds left after this much expected work; negative if it does not fit."""
        return seconds_left - self.keep_s - self.margin * work_s


def at_notice(
    *,
    seconds_left: float | None,
    unsaved_steps: int,
    save_s: float | None,
    under_way_for_s: float | None = None,
    policy: NoticePolicy = NoticePolicy(),
) -> NoticeDecision:
    """Decide on the most that can be saved for certain in the time left.

    ``seconds_left`` is None if the notice has no time, ``save_s`` if no save was measured: trying then costs little,
    since only complete checkpoints are published. ``under_way_for_s`` is the age of a save that is not complete yet.
    ``unsaved_steps`` counts the steps that neither it nor the last checkpoint has.
    """
    under_way = under_way_for_s is not None
    if unsaved_steps <= 0 and not under_way:
        return _decided("rely", "the last checkpoint has this step")
    if seconds_left is not None and policy.spare_s(seconds_left, 0.0) < 0:
        return _decided("rely", f"{format_seconds(seconds_left)} are left, which is too late to save")
    if seconds_left is None or save_s is None:
        unknown = "the time left is unknown" if seconds_left is None else "no save was measured yet"
        if under_way:
            return _decided("finish", f"a save is under way, and {unknown}")
        return _decided("save", f"{_steps(unsaved_steps)} would be lost, and {unknown}")

    rest_s = 0.0 if under_way_for_s is None else max(0.0, save_s - under_way_for_s)
    left, save, rest = map(format_seconds, (seconds_left, save_s, rest_s))
    if unsaved_steps > 0 and policy.spare_s(seconds_left, rest_s + save_s) >= 0:
        after = f" after the {rest} of the save under way" if under_way else ""
        return _decided("save", f"saving {_steps(unsaved_steps)} should take {save}{after}, and {left} are left")
    if under_way and policy.spare_s(seconds_left, rest_s) >= 0:
        another = f", too few for another of {save}" if unsaved_steps > 0 else ""
        return _decided("finish", f"the save under way should take {rest} more, and {left} are left{another}")
    needed = f"the save under way needs {rest} more" if under_way else f"a save needs {save}"
    kept = f"{policy.margin:g} times that and {format_seconds(policy.keep_s)} would be safe"
    return _decided("rely", f"{left} are left and {needed}: {kept}, so the last checkpoint has to do")


def _decided(choice: Choice, why: str) -> NoticeDecision:
    return NoticeDecision(choice=choice, why=why)


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"
