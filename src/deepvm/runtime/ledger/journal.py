"""A run's events -> its ledger, now or when the disk has space again: a full disk does not end the run."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable

from deepvm.errors import MalformedFile
from deepvm.events import Event
from deepvm.runtime.ledger.ledger import Ledger
from deepvm.runtime.ledger.sqlite_file import LedgerError

RETRY_S = 1.0  # between two attempts
CHECK_S = 1.0  # between two checks that the file exists
MOST_WAITING = 200_000  # events that wait for space: some 100 MB


class Journal:
    """For one thread. ``warn`` is called with one sentence when writing fails, and when it works again."""

    def __init__(self, ledger: Ledger, warn: Callable[[str], None]) -> None:
        self._ledger, self._warn = ledger, warn
        self.waiting: list[Event] = []  # not written yet
        self._problem: str | None = None
        self._dropped = 0
        self._retry_at_s = self._check_at_s = 0.0
        self._file = _identity(ledger)
        self.gone = False  # it was deleted or replaced

    def append(self, events: Iterable[Event]) -> None:
        """Write events, now or when there is space again."""
        self.waiting += events
        if self.waiting and (self._problem is None or time.monotonic() >= self._retry_at_s):
            self._write()

    def check(self) -> None:
        """Retry failed writes, and detect a ledger that was deleted; call it often."""
        self.append(())
        if self.gone or time.monotonic() < self._check_at_s:
            return
        self._check_at_s = time.monotonic() + CHECK_S
        if _identity(self._ledger) != self._file:
            self.gone = True
            self._warn(
                f"{self._ledger.path.parent} was deleted or replaced: the ledger, logs and checkpoints on disk are "
                "lost with it; training continues, but this run can neither be resumed nor reported later"
            )

    def close(self) -> int:
        """Try a last time. Return how many events the ledger lacks."""
        if self.waiting:
            self._write()
        return len(self.waiting) + self._dropped

    def _write(self) -> None:
        try:
            self._ledger.append(self.waiting)
        except (LedgerError, MalformedFile) as error:
            self._retry_at_s = time.monotonic() + RETRY_S
            self._thin_out()
            if self._problem is None:
                self._problem = str(error)
                self._warn(f"{error}: training continues, and events are written when that works again")
            return
        self.waiting = []
        if self._problem is not None:
            self._problem = None
            lacking = f"; it lacks {self._dropped:,} events" if self._dropped else ""
            self._warn(f"{self._ledger.path} is written again{lacking}")

    def _thin_out(self) -> None:
        """Bound the memory: drop steps first, since other events are rare."""
        if len(self.waiting) <= MOST_WAITING:
            return
        kept = [event for event in self.waiting if event.kind != "step"][-MOST_WAITING // 2 :]
        self._dropped += len(self.waiting) - len(kept)
        self.waiting = kept


def _identity(ledger: Ledger) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        found = os.stat(ledger.path)
        return found.st_dev, found.st_ino
    return None
