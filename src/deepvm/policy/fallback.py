"""When a gang rents on-demand machines to keep a deadline: what is left of its job in, moments out. Pure.

The simulator asks for many runs at once, the runtime for one. Both use the same objects. All moments are hours since
the start of the job.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rest:
    """A job with a deadline, and what is left of it. Work is in hours of undisturbed training of the whole gang."""

    work_h: float  # all of it
    done_h: Floats  # that is safe
    deadline_h: float | None
    speed: float  # of the on-demand machines, over that of the whole gang
    needed_h: Floats  # that these take for the rest, saves included
    margin_h: float


def margin_h(*, start_h: float, restore_h: float, move_h: float = 0.0, worst_loss_h: float) -> float:
    """Return the time before the last moment at which on-demand machines start: one more spell may be lost in vain."""
    return 2 * (start_h + restore_h) + move_h + (worst_loss_h if np.isfinite(worst_loss_h) else 0.0)


class Fallback(Protocol):
    """When a gang rents on-demand machines."""

    @property
    def returns(self) -> bool:
        """True if it returns to spot machines, once they are up."""
        ...

    def from_h(self, rest: Rest) -> Floats:
        """Return the time from which on-demand machines are used while no spot machines are up."""
        ...

    def must_h(self, rest: Rest) -> Floats:
        """Return the time from which they are used even if spot machines are up."""
        ...

    def stay_h(self, rest: Rest) -> Floats:
        """Return the time from which it does not return to spot machines any more, but for a margin."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SafetyNet:
    """On-demand machines so late that the deadline can just be kept.

    ``tries`` is how often spot machines may then be tried once more. On-demand machines are rented so much earlier, and
    returned as soon as spot machines are up. Without tries, they are kept to the end."""

    tries: int = 0

    @property
    def returns(self) -> bool:
        return self.tries > 0

    def from_h(self, rest: Rest) -> Floats:
        last_h = self.must_h(rest)
        return last_h if not self.tries else np.maximum(0.0, last_h - self.tries * rest.margin_h)

    def must_h(self, rest: Rest) -> Floats:
        if rest.deadline_h is None or rest.speed <= 0:
            return np.full_like(rest.done_h, np.inf)
        if rest.work_h / rest.speed > rest.deadline_h:  # too few on-demand machines to keep it: they would only cost
            return np.full_like(rest.done_h, np.inf)
        return np.maximum(0.0, rest.deadline_h - rest.needed_h - rest.margin_h)

    def stay_h(self, rest: Rest) -> Floats:
        return self.must_h(rest)


@dataclass(frozen=True, kw_only=True, slots=True)
class UniformProgress:
    """Can't Be Late (NSDI 2024): on-demand machines while the work done is behind a straight line to the deadline."""

    returns: bool = True

    def from_h(self, rest: Rest) -> Floats:
        last_h = self.must_h(rest)
        if rest.deadline_h is None or not np.isfinite(last_h).any():
            return last_h
        return np.minimum(last_h, rest.done_h / rest.work_h * rest.deadline_h)

    def must_h(self, rest: Rest) -> Floats:
        return SafetyNet().must_h(rest)

    def stay_h(self, rest: Rest) -> Floats:
        return self.from_h(rest)
