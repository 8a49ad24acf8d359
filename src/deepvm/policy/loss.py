"""What the remaining trainers do after a loss: group sizes and a wait in, a decision out. Pure; the hub asks it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from deepvm.errors import UsageError
from deepvm.units import parse_seconds

_LIKE = "wait, wait:30s, wait:30s:2, shrink, shrink:2"


@dataclass(frozen=True, kw_only=True, slots=True)
class AfterLoss:
    """Wait ``wait_s`` for missing trainers (inf: for ever), then continue with ``least`` or more."""

    wait_s: float = math.inf
    least: int = 1

    def __post_init__(self) -> None:
        if not self.wait_s >= 0:
            raise UsageError(f"wait_s is {self.wait_s}: it must not be negative")
        if self.least < 1:
            raise UsageError(f"least is {self.least}: a group needs at least 1 trainer")

    def decide(self, joined: int, wanted: int, waited_s: float) -> bool:
        """True if the group may form now: with all trainers always, with fewer after the wait."""
        if joined < 1:
            return False
        return joined >= wanted or (joined >= self.least and waited_s >= self.wait_s)

    def __str__(self) -> str:
        least = f":{self.least}" if self.least > 1 else ""
        if math.isinf(self.wait_s):
            return "wait"
        return f"wait:{repr(self.wait_s).removesuffix('.0')}s{least}" if self.wait_s > 0 else f"shrink{least}"


def parse_after_loss(text: str) -> AfterLoss:
    """Parse ``wait`` (for ever), ``wait:30s`` (then shrink), ``shrink`` (at once); ``:2`` sets the least group size."""
    kind, *settings = text.strip().lower().split(":")
    if kind == "wait" and not settings:
        return AfterLoss()
    if kind == "wait" and len(settings) <= 2 and settings[0][-1:].isalpha():  # a number needs a unit: 30s
        return AfterLoss(wait_s=_seconds(settings[0], text), least=_least(settings[1:], text))
    if kind == "shrink" and len(settings) <= 1:
        return AfterLoss(wait_s=0.0, least=_least(settings, text))
    raise _not_understood(text)


def _seconds(setting: str, text: str) -> float:
    try:
        return parse_seconds(setting)
    except UsageError:
        raise _not_understood(text) from None


def _least(settings: list[str], text: str) -> int:
    if not settings:
        return 1
    if not settings[0].isdecimal() or int(settings[0]) < 1:
        raise _not_understood(text)
    return int(settings[0])


def _not_understood(text: str) -> UsageError:
    return UsageError(f"{text!r} is not a valid policy for losses: write it like {_LIKE}")
