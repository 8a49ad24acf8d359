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
from deepvm.performance.checks import check_number
from deepvm.policy.saving import Moment, SavePolicy

Floats = NDArray[np.float64]
_MOST_STEPS = 1_000_000
_HALF_INSTANT = 1e-6  # of a step: work that is a whole number of steps but for its rounding
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

    def age_h(self, elapsed_h: ArrayLike) -> Floats:
        """Return how long ago the newest save began; inf if none has."""
        ...

    @property
    def save_h(self) -> float:
        """The time from the beginning of a save until it is safe; inf if there are no saves."""
        ...

    @property
    def worst_loss_h(self) -> float:
        """The most time that one loss repeats."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class NeverSave:
    """Without checkpoints: a loss loses everything, but for a save at its notice, if ``save_h`` is finite."""

    save_h: float = math.inf

    def trained(self, elapsed_h: ArrayLike) -> Floats:
        return np.maximum(0.0, np.asarray(elapsed_h, dtype=np.float64))

    def safe(self, elapsed_h: ArrayLike) -> Floats:
        return np.zeros_like(np.asarray(elapsed_h, dtype=np.float64))

    def needed(self, work_h: ArrayLike) -> Floats:
        return np.asarray(work_h, dtype=np.float64)

    def age_h(self, elapsed_h: ArrayLike) -> Floats:
        return np.full_like(np.asarray(elapsed_h, dtype=np.float64), np.inf)

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

    def age_h(self, elapsed_h: ArrayLike) -> Floats:
        since = np.asarray(elapsed_h, dtype=np.float64) - self.interval_h  # the first save began
        whole = np.floor(since / (self.interval_h + self.stall_h) + _ROUNDING)
        return np.where(whole >= 0, since - whole * (self.interval_h + self.stall_h), np.inf)

    @property
    def save_h(self) -> float:
        return self.stall_h + self.remote_h

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

    def age_h(self, elapsed_h: ArrayLike) -> Floats:
        elapsed = np.asarray(elapsed_h, dtype=np.float64)
        begun = self._elapsed[:-1] + self.interval_h
        k = np.searchsorted(begun, elapsed + _ROUNDING, side="right") - 1
        inside = np.where(k >= 0, elapsed - begun[np.maximum(0, k)], np.inf)
        return np.minimum(inside, self._rest.age_h(elapsed - self._elapsed[-1]))

    @property
    def save_h(self) -> float:
        return self.stall_h + self.remote_h

    @property
    def worst_loss_h(self) -> float:
        return float(self.interval_h.max()) + self.stall_h + self.remote_h


@dataclass(frozen=True, kw_only=True)
class PolicySaves:
    """Whole steps, and a save policy that is asked after each of them, as a run asks it.

    A step that a loss interrupts brings nothing. A spell counts its steps from zero, as a policy by steps does in a run
    that was restored from one of its own saves.
    """

    policy: SavePolicy
    work_h: float  # the longest spell
    step_h: float
    stall_h: float = 0.0
    remote_h: float = 0.0
    _finished: Floats = field(init=False, repr=False, compare=False)  # when each step is, from the 0th on
    _saved: NDArray[np.int64] = field(init=False, repr=False, compare=False)  # the steps that are saved, with the 0th
    _safe: Floats = field(init=False, repr=False, compare=False)  # since when each of these is safe

    def __post_init__(self) -> None:
        check_number("work_h", self.work_h, above=0)
        check_number("step_h", self.step_h, above=0)
        check_number("stall_h", self.stall_h, at_least=0)
        check_number("remote_h", self.remote_h, at_least=0)
        steps = self._steps(self.work_h)
        if steps > _MOST_STEPS:
            raise UsageError(f"the work has {steps:,} steps: at most {_MOST_STEPS:,} are asked one by one")
        finished, saved, safe = [0.0], [0], [0.0]
        now_h = last_saved_h = 0.0
        for step in range(1, int(steps) + 1):
            now_h += self.step_h
            finished.append(now_h)
            under_way = len(safe) > 1 and safe[-1] > now_h
            moment = Moment(
                step=step,
                now_s=now_h * 3600,
                last_saved_step=saved[-1],
                last_saved_s=last_saved_h * 3600,
                save_cost_s=self.stall_h * 3600,
                save_took_s=(self.stall_h + self.remote_h) * 3600,
                under_way_for_s=(now_h - last_saved_h) * 3600 if under_way else None,
            )
            if not under_way and self.policy.due(moment):
                last_saved_h = now_h
                now_h += self.stall_h
                saved.append(step)
                safe.append(now_h + self.remote_h)
        object.__setattr__(self, "_finished", np.array(finished))
        object.__setattr__(self, "_saved", np.array(saved))
        object.__setattr__(self, "_safe", np.array(safe))

    def _steps(self, work_h: ArrayLike) -> NDArray[np.int64]:
        return np.ceil(np.asarray(work_h, dtype=np.float64) / self.step_h - _HALF_INSTANT).astype(np.int64)

    def trained(self, elapsed_h: ArrayLike) -> Floats:
        steps = np.searchsorted(self._finished, np.asarray(elapsed_h, dtype=np.float64) + _ROUNDING, side="right") - 1
        return np.asarray(np.maximum(0, steps) * self.step_h)

    def safe(self, elapsed_h: ArrayLike) -> Floats:
        last = np.searchsorted(self._safe, np.asarray(elapsed_h, dtype=np.float64) + _ROUNDING, side="right") - 1
        return np.asarray(self._saved[np.maximum(0, last)] * self.step_h)

    def needed(self, work_h: ArrayLike) -> Floats:
        return np.asarray(self._finished[np.clip(self._steps(work_h), 0, len(self._finished) - 1)])

    def age_h(self, elapsed_h: ArrayLike) -> Floats:
        elapsed = np.asarray(elapsed_h, dtype=np.float64)
        last = np.searchsorted(self._safe[1:] - self.save_h, elapsed + _ROUNDING, side="right")
        return np.where(last > 0, elapsed - (self._safe[last] - self.save_h), np.inf)

    @property
    def save_h(self) -> float:
        return self.stall_h + self.remote_h

    @property
    def worst_loss_h(self) -> float:
        continued = self._safe - self.remote_h  # the end of each save's stall
        continued[0] = 0.0
        return float((np.append(self._safe[1:], self._finished[-1]) - continued).max())
