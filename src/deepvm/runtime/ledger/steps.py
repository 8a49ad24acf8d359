"""A run's step events -> columns in the order of time, which hold a million steps."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from deepvm.runtime.ledger.bill import number

LARGEST = 2**62


class StepColumns:
    """Gathers step events; those without a valid step number are left out."""

    def __init__(self) -> None:
        self._at_s, self._seconds, self._world_size = array("d"), array("d"), array("d")
        self._step = array("q")

    def add(self, at_s: float, data: Mapping[str, Any]) -> None:
        step, seconds, world_size = data.get("step"), data.get("seconds"), data.get("world_size")
        if type(step) is not int or abs(step) > LARGEST:
            return
        self._at_s.append(at_s)
        self._step.append(step)
        self._seconds.append(number(seconds) or 0.0)
        self._world_size.append(number(world_size) or 1.0)

    def steps(self, groups: Iterable[tuple[float, int]] = ()) -> Steps:
        """Return the steps. ``groups``: when each was formed, and its number of machines, each with one or more
        ranks."""
        at_s = np.array(self._at_s, dtype=np.float64)
        order = np.argsort(at_s, kind="stable")
        machines = np.array(self._world_size, dtype=np.float64)[order]
        formed = sorted(groups)
        if formed:
            sizes = np.array([np.inf, *(size for _, size in formed)])  # not known before the first
            latest = np.searchsorted(np.array([s for s, _ in formed]), at_s[order], side="right")
            machines = np.minimum(machines, sizes[latest])
        return Steps(
            at_s[order],
            np.array(self._step, dtype=np.int64)[order],
            np.array(self._seconds, dtype=np.float64)[order],
            machines,
        )


class Steps:
    """Every execution of a step: ``machines`` trained in it for ``seconds``."""

    def __init__(
        self,
        at_s: npt.NDArray[np.float64],
        step: npt.NDArray[np.int64],
        seconds: npt.NDArray[np.float64],
        machines: npt.NDArray[np.float64],
    ) -> None:
        self.at_s, self.step = at_s, step
        distinct, from_the_end = np.unique(step[::-1], return_index=True)
        useful = np.zeros(len(step), dtype=bool)
        useful[len(step) - 1 - from_the_end] = True  # the last execution of each
        self.done = len(distinct)
        self.repeated = len(step) - len(distinct)
        self.repeated_s = float(np.sum(seconds[~useful]))
        self.useful_machine_s = float(np.sum(seconds[useful] * machines[useful]))

    def count_until(self, at_s: float) -> int:
        """Return how many were finished by then."""
        return int(np.searchsorted(self.at_s, at_s, side="right"))

    def after(self, at_s: float, *, skip: int = 0) -> float | None:
        """Return when the first step finished after that time, or the one ``skip`` steps later; None if none did."""
        index = self.count_until(at_s) + skip
        return float(self.at_s[index]) if index < len(self.at_s) else None

    def last(self, at_s: float, *, first: int, default: float) -> float:
        """Return when the last step by then was finished; ``default`` if none from ``first`` on was."""
        end = self.count_until(at_s)
        return float(self.at_s[end - 1]) if end > first else default

    def above(self, step: int | None, first: int, end: int) -> int:
        """Return how many of the executions [first, end) were of steps above this one; all if it is None."""
        return end - first if step is None else int(np.count_nonzero(self.step[first:end] > step))
