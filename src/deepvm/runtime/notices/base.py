"""A notice of a machine's end, and the interface of every source."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

from deepvm.errors import UsageError

Action = Literal["terminate", "stop", "hibernate", "rebalance"]
ACTIONS: tuple[Action, ...] = ("terminate", "stop", "hibernate", "rebalance")


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """``rebalance`` is a warning that the end is likelier now; all others name the end itself."""

    action: Action
    at_s: float | None  # of the end, since 1970; None if not given
    source: str

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise UsageError(f"unknown action of a notice {self.action!r}: it must be one of {', '.join(ACTIONS)}")
        if self.at_s is not None and not math.isfinite(self.at_s):
            raise UsageError(f"at_s of a notice is {self.at_s}: it must be finite")

    def seconds_left(self, now_s: float) -> float | None:
        return None if self.at_s is None else max(0.0, self.at_s - now_s)


class NoticeSource(Protocol):
    @property
    def interval_s(self) -> float:
        """Return the seconds between two polls."""
        ...

    def poll(self) -> Notice | None:
        """Return the present notice. Never raises: a source that cannot be reached has none."""
        ...
