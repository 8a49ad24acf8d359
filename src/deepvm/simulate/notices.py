"""Losses that were announced: a notice's time and a gang's saves in, the work that survives out.

``policy.at_notice`` decides, as in a run. There the machine leaves after its last save, or at once if none fits: so an
announced loss ends training at its notice. Traces do not tell which losses were announced: a share of them is drawn by
zone and tick, and every strategy meets the same notices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deepvm.performance.checks import check_number
from deepvm.policy.notice import Choice, NoticePolicy, at_notice
from deepvm.simulate.saves import SaveTimes

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
_HALVINGS = 60  # of an age, until it is known to the last bit


@dataclass(frozen=True, kw_only=True, slots=True)
class Notices:
    seconds: float  # from a notice to the loss
    share: float = 1.0  # of the losses that are announced
    policy: NoticePolicy = NoticePolicy()  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        check_number("seconds", self.seconds, at_least=0)
        check_number("share", self.share, at_least=0, at_most=1)

    @property
    def hours(self) -> float:
        return self.seconds / 3600

    def announced(self, zone: Ints, tick: Ints) -> Flags:
        """Return which losses are announced: those of the zone at the beginning of the tick."""
        if self.share >= 1:
            return np.ones(np.shape(tick), bool)
        with np.errstate(over="ignore"):  # SplitMix64, which wraps round
            mixed = (np.asarray(zone).astype(np.uint64) << np.uint64(40)) + np.asarray(tick).astype(np.uint64)
            mixed = (mixed + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
            mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            mixed ^= mixed >> np.uint64(31)
        return np.asarray((mixed >> np.uint64(11)).astype(np.float64) < self.share * 2**53)

    def kept(self, saves: SaveTimes, told_h: ArrayLike) -> Floats:
        """Return the work that survives a loss that is announced after this time of training."""
        told, save_s = np.asarray(told_h, dtype=np.float64), saves.save_h * 3600
        if not math.isfinite(save_s):
            return saves.safe(told)
        age_h = saves.age_h(told)
        under_way = age_h < saves.save_h
        another_s, finish_s = (
            _least_age_s(self.seconds, save_s, self.policy, choices) for choices in (("save",), ("save", "finish"))
        )
        fits = np.where(
            under_way, age_h * 3600 >= another_s, _choice(self.seconds, save_s, None, self.policy) == "save"
        )
        finished = saves.trained(told - np.where(under_way, age_h, 0.0))  # the work in the save under way
        last = np.where(under_way & (age_h * 3600 >= finish_s), finished, saves.safe(told))
        return np.where(fits, saves.trained(told), last)


def counted_on(share: float, seconds: float) -> tuple[str, ...]:
    """Say what figures count on, if they do."""
    if not share:
        return ()
    if not seconds:
        return ("the cloud promises no notices, so none is counted on",)
    return (f"counts on {share:.0%} of the losses being announced {seconds:g} s before: no cloud promises that",)


def _choice(seconds_left: float, save_s: float, under_way_for_s: float | None, policy: NoticePolicy) -> Choice:
    """Ask the policy of a gang with unsaved work. With none, its answer differs, and what survives does not."""
    return at_notice(
        seconds_left=seconds_left, unsaved_steps=1, save_s=save_s, under_way_for_s=under_way_for_s, policy=policy
    ).choice


@lru_cache(maxsize=1024)
def _least_age_s(seconds_left: float, save_s: float, policy: NoticePolicy, choices: tuple[Choice, ...]) -> float:
    """Return how old a save under way must be for one of these choices; inf if none is old enough."""
    low, high = 0.0, save_s
    if _choice(seconds_left, save_s, low, policy) in choices:
        return 0.0
    if _choice(seconds_left, save_s, high, policy) not in choices:
        return math.inf
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _choice(seconds_left, save_s, middle, policy) in choices:
            high = middle
        else:
            low = middle
    return high
