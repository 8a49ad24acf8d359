"""A run's events -> how long its steps, saves, starts and restores take now, for ``last_moment``."""

from __future__ import annotations

import statistics
from collections import deque

from deepvm.events import Event
from deepvm.runtime.ledger.bill import number

_MOST_STEPS, _MOST_OTHERS = 64, 16  # of the newest, that a median is taken of


class Pace:
    """Medians in seconds; None until one was measured. Steps are those of the largest group."""

    def __init__(self) -> None:
        self._world_size = 0
        self._steps: deque[float] = deque(maxlen=_MOST_STEPS)
        self._stalls: deque[float] = deque(maxlen=_MOST_OTHERS)
        self._saves: deque[float] = deque(maxlen=_MOST_OTHERS)
        self._starts: deque[float] = deque(maxlen=_MOST_OTHERS)
        self._restores: deque[float] = deque(maxlen=_MOST_OTHERS)
        self._up_at_s: float | None = None  # the last machine that came up for the next group
        self._fresh = True  # the next step is the first of a group, which is not typical
        self._restored_s = 0.0  # of the next group
        self._trained_s: tuple[float, float] | None = None  # the first and the last step of this group

    @property
    def step_s(self) -> float | None:
        return _median(self._steps)

    @property
    def stall_s(self) -> float:
        """Return how long a save stops training; zero until one was measured."""
        return _median(self._stalls) or 0.0

    @property
    def save_s(self) -> float:
        """Return the time from the start of a save until it is safe; zero until one was measured."""
        return _median(self._saves) or 0.0

    @property
    def start_s(self) -> float | None:
        """Return the time from the last machine that came up to training, without the restore."""
        return _median(self._starts)

    @property
    def restore_s(self) -> float:
        """Return the time of a restore; until one was measured, that of a save, which moves the same bytes."""
        return _median(self._restores) or self.save_s

    @property
    def trained_s(self) -> float | None:
        """Return the time from the first to the last step of the present group; None before its first."""
        return None if self._trained_s is None else self._trained_s[1] - self._trained_s[0]

    def end_group(self) -> None:
        """Expect another group: what comes of the present one does not count for it."""
        self._fresh, self._restored_s, self._trained_s = True, 0.0, None

    def observe(self, event: Event) -> None:
        data, seconds = event.data, number(event.data.get("seconds"))
        if event.kind == "machine-up":
            self._up_at_s = event.at_s
        elif event.kind == "group":
            self.end_group()
        elif event.kind == "restored" and seconds is not None:
            self._restored_s = max(self._restored_s, seconds)
        elif event.kind == "save" and data.get("state") == "remote" and data.get("rank", 0) == 0:
            if seconds is not None:
                self._saves.append(seconds)
            stall_s = number(data.get("stall_s"))
            if stall_s is not None:
                self._stalls.append(stall_s)
        elif event.kind == "step" and seconds is not None:
            if self._fresh:
                self._first_step(event.at_s, seconds)
            else:
                self._step(seconds, int(number(data.get("world_size")) or 1))
            self._trained_s = (self._trained_s or (event.at_s,))[0], event.at_s

    def _first_step(self, at_s: float, seconds: float) -> None:
        self._fresh = False
        if self._restored_s:
            self._restores.append(self._restored_s)
        if self._up_at_s is not None:
            self._starts.append(max(0.0, at_s - seconds - self._restored_s - self._up_at_s))
            self._up_at_s = None

    def _step(self, seconds: float, world_size: int) -> None:
        if world_size > self._world_size:
            self._world_size = world_size
            self._steps.clear()
        if world_size == self._world_size:
            self._steps.append(seconds)


def _median(seconds: deque[float]) -> float | None:
    return statistics.median(seconds) if seconds else None
