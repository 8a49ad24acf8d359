"""How training proceeds between two losses: time since training began in; work done, work safe and time needed out.

All figures are hours and vectorised. The work is that of the gang: one hour of undisturbed training is one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deepvm.errors import UsageError

Floats = NDArray[np.float64]
_ROUNDING = 1e-12  # an elapsed time that is a whole number of cycles but for its rounding


class SaveTimes(Protocol):
    def trained(self, elapsed_h: ArrayLike) -> Floats:
        """Return the work done after this time."""
        ...

    def safe(self, elapsed_h: ArrayLike) -> Floats:
        """Return the work that survives a loss after this time."""
        ...

    def needed(self, work_h: ArrayLike) -> Floats:
        """Return the time that this much work takes, saves included."""
        ...

    @property
    def worst_loss_h(self) -> float:
        """The most time that one loss repeats."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class NeverSave:
    """Without checkpoints: a loss loses everything."""

    def trained(self, elapsed_h: ArrayLike) -> Floats:
        return np.maximum(0.0, np.asarray(elapsed_h, dtype=np.float64))

    def safe(self, elapsed_h: ArrayLike) -> Floats:
        return np.zeros_like(np.asarray(elapsed_h, dtype=np.float64))

    def needed(self, work_h: ArrayLike) -> Floats:
        return np.asarray(work_h, dtype=np.float64)

    @property
    def worst_loss_h(self) -> float:
        return math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedInterval:
    """Train for an interval, stall for a save, and so on. A save is safe ``remote_h`` after its stall."""

    interval_h: float
    stall_h: float = 0.0
    remote_h: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.interval_h) and self.interval_h > 0):
            raise UsageError(f"the interval is {self.interval_h} h: it must be finite and above zero")
        if not (self.stall_h >= 0 and self.remote_h >= 0):
            raise UsageError(f"stall_h is {self.stall_h} and remote_h {self.remote_h}: neither may be negative")

    def trained(self, elapsed_h: ArrayLike) -> Floats:
        elapsed = np.maximum(0.0, np.asarray(elapsed_h, dtype=np.float64))
        cycle = self.interval_h + self.stall_h
        whole = np.floor(elapsed / cycle + _ROUNDING)
        return np.asarray(whole * self.interval_h + np.clip(elapsed - whole * cycle, 0.0, self.interval_h))

    def safe(self, elapsed_h: ArrayLike) -> Floats:
        elapsed = np.asarray(elapsed_h, dtype=np.float64) - self.remote_h
        cycle = self.interval_h + self.stall_h
        return np.asarray(np.maximum(0.0, np.floor(elapsed / cycle + _ROUNDING)) * self.interval_h)

    def needed(self, work_h: ArrayLike) -> Floats:
        work = np.asarray(work_h, dtype=np.float64)
        saves = np.maximum(0.0, np.ceil(work / self.interval_h - _ROUNDING) - 1.0)  # none at the end
        return np.asarray(work + saves * self.stall_h)

    @property
    def worst_loss_h(self) -> float:
        return self.interval_h + self.stall_h + self.remote_h


@dataclass(frozen=True, kw_only=True)
class IntervalsByAge:
    """Intervals that change with a spell's age: ``interval_h[k]`` hours of training before save k; the last repeats."""

    interval_h: Floats
    stall_h: float = 0.0
    remote_h: float = 0.0
    _work: Floats = field(init=False, repr=False, compare=False)  # done before each save
    _elapsed: Floats = field(init=False, repr=False, compare=False)  # until the end of each save's stall

    def __post_init__(self) -> None:
        if not self.interval_h.size or not (self.interval_h > 0).all() or not np.isfinite(self.interval_h).all():
            raise UsageError("intervals by age need at least one interval, all finite and above zero")
        work = np.concatenate([[0.0], np.cumsum(self.interval_h)])
        object.__setattr__(self, "_work", work)
        object.__setattr__(self, "_elapsed", work + self.stall_h * np.arange(len(work)))

    @property
    def _rest(self) -> FixedInterval:
        return FixedInterval(interval_h=float(self.interval_h[-1]), stall_h=self.stall_h, remote_h=self.remote_h)

    def trained(self, elapsed_h: ArrayLike) -> Floats:
        elapsed = np.maximum(0.0, np.asarray(elapsed_h, dtype=np.float64))
        k = np.clip(np.searchsorted(self._elapsed, elapsed + _ROUNDING, side="right") - 1, 0, len(self._work) - 2)
        inside = self._work[k] + np.minimum(elapsed - self._elapsed[k], self.interval_h[k])
        beyond = self._work[-1] + self._rest.trained(elapsed - self._elapsed[-1])
        return np.where(elapsed >= self._elapsed[-1], beyond, inside)

    def safe(self, elapsed_h: ArrayLike) -> Floats:
        elapsed = np.asarray(elapsed_h, dtype=np.float64)
        k = np.clip(
            np.searchsorted(self._elapsed, elapsed - self.remote_h + _ROUNDING, side="right") - 1,
            0,
            len(self._work) - 1,
        )
        beyond = self._work[-1] + self._rest.safe(elapsed - self._elapsed[-1])
        return np.where(elapsed - self.remote_h >= self._elapsed[-1], beyond, self._work[k])

    def needed(self, work_h: ArrayLike) -> Floats:
        work = np.asarray(work_h, dtype=np.float64)
        k = np.clip(np.searchsorted(self._work, work, side="left") - 1, 0, len(self._work) - 1)
        beyond = self._elapsed[-1] + self._rest.needed(np.maximum(0.0, work - self._work[-1]))
        return np.where(work > self._work[-1], beyond, work + k * self.stall_h)

    @property
    def worst_loss_h(self) -> float:
        return float(self.interval_h.max()) + self.stall_h + self.remote_h
