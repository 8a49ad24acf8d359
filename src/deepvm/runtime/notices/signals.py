"""A signal as a notice: for schedulers and clouds that announce an end this way."""

from __future__ import annotations

import math
import signal
import time
from types import FrameType

from deepvm.errors import UsageError
from deepvm.runtime.notices.base import Notice


class SignalNotices:
    """Make it in the main thread, where Python handles signals; ``close`` restores the earlier handler."""

    interval_s = 0.1

    def __init__(self, number: signal.Signals = signal.SIGUSR1, *, seconds: float = 30.0) -> None:
        if not (math.isfinite(seconds) and seconds >= 0):
            raise UsageError(f"a signal {seconds} s before the end: the time must be finite and not negative")
        self._number, self._seconds = number, seconds
        self._ends_s: float | None = None
        try:
            self._before = signal.signal(number, self._on_signal)
        except (OSError, ValueError) as error:
            raise UsageError(f"{number.name} cannot be used for notices: {error}") from None

    def poll(self) -> Notice | None:
        if self._ends_s is None:
            return None
        return Notice(action="terminate", at_s=self._ends_s, source=f"signal {self._number.name}")

    def close(self) -> None:
        signal.signal(self._number, self._before or signal.SIG_DFL)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        now_s = time.time()
        if self._ends_s is None or self._ends_s <= now_s:  # a second signal does not delay the end
            self._ends_s = now_s + self._seconds
