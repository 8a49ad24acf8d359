"""Writes a run's events into its ledger, whatever becomes of the disk: a run that trains outlives a full one."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable

from deepvm.errors import MalformedFile
from deepvm.events import Event
from deepvm.runtime.ledger.ledger import Ledger
from deepvm.runtime.ledger.sqlite_file import LedgerError

AGAIN_S = 1.0  # between two attempts
LOOK_S = 1.0  # how often to look whether the file is still there
MOST_WAITING = 200_000  # events that wait for space: some 100 MB


class Journal:
    """For one thread. ``warn`` is called with one sentence when something is wrong, and when it is well again."""

    def __init__(self, ledger: Ledger, warn: Callable[[str], None]) -> None:
        self._ledger, self._warn = ledger, warn
        self.waiting: list[Event] = []  # what could not be written yet
        self._problem: str | None = None
        self._dropped = 0
        self._again_s = self._look_s = 0.0
        self._file = _identity(ledger)
        self.gone = False  # somebody deleted it

    def append(self, events: Iterable[Event]) -> None:
        """Write them, now or when there is space again."""
        self.waiting += events
        if self.waiting and (self._problem is None or time.monotonic() >= self._again_s):
            self._write()

    def check(self) -> None:
        """Try again what could not be written, and notice a ledger that was deleted; call it often."""
        self.append(())
        if self.gone or time.monotonic() < self._look_s:
            return
        self._look_s = time.monotonic() + LOOK_S
        if _identity(self._ledger) != self._file:
            self.gone = True
            self._warn(
                f"{self._ledger.path.parent} was deleted or replaced: the ledger, logs and checkpoints on disk are "
                "lost with it; training continues, but this run can neither be resumed nor reported later"
            )

    def close(self) -> int:
        """Try a last time. Returns how many events the ledger lacks."""
        self._again_s = 0.0
        self.append(())
        return len(self.waiting) + self._dropped

    def _write(self) -> None:
        try:
            self._ledger.append(self.waiting)
        except (LedgerError, MalformedFile) as error:
            self._again_s = time.monotonic() + AGAIN_S
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
        """Keep memory bounded: steps go first, since all else is rare."""
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
