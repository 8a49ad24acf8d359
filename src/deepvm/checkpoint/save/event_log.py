"""A trainer's events: one line for each, of the form in ``deepvm.events``, in the file that DEEPVM_EVENTS names.

Each line is one write to the end of the file, so that several processes can share it. Training continues whatever is
wrong with the file.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any

from deepvm.checkpoint.handle import SaveHandle, State
from deepvm.events import Event

log = logging.getLogger("deepvm.checkpoint")


class EventLog:
    """Rank 0 logs steps and saves; every rank what it restored, and saves that are committed."""

    def __init__(self, path: str | None, rank: int, world_size: int) -> None:
        self._path, self._rank, self._world_size = path, rank, world_size
        self._lock = threading.Lock()
        self._file: int | None = None
        self._truncated = self._warned = False
        self._last_skip: str | None = None

    def restored(self, step: int, seconds: float, *, place: str, fetched: bool) -> None:
        self._write("restored", step=step, seconds=seconds, rank=self._rank, place=place, fetched=fetched)

    def stepped(self, step: int, seconds: float) -> None:
        if self._rank == 0:
            self._write("step", step=step, seconds=seconds, world_size=self._world_size)

    def saved(
        self, handle: SaveHandle, state: State, *, place: str | None = None, why: str | None = None, first: bool = False
    ) -> None:
        """Log what became of a save. Of several in a row that are skipped for one reason, log the first; ``first``
        marks the first that failed for a reason, which people are shown."""
        if self._rank != 0 and state != "remote":
            return
        if state == "skipped" and why == self._last_skip:
            return
        self._last_skip = why if state == "skipped" else None
        self._write(
            "save",
            step=handle.step,
            state=state,
            stall_s=handle.stall_s,
            seconds=time.perf_counter() - handle.began_s,
            bytes=handle.size_bytes,
            bytes_sent=handle.bytes_sent,
            place=place,
            why=why,
            rank=self._rank,
            **({"first": True} if first else {}),
        )

    def close(self) -> None:
        with self._lock:
            self._path = None
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _write(self, kind: str, **data: Any) -> None:
        if self._path is None:
            return
        line = Event.now(kind, **data).to_line().encode() + b"\n"
        with self._lock:
            try:
                self._append(line)
            except OSError as error:
                self._warn(error.strerror or str(error))

    def _append(self, line: bytes) -> None:
        if self._path is None:  # closed meanwhile
            return
        if self._file is None:
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if self._truncated:
            line = b"\n" + line
        written = os.write(self._file, line)
        self._truncated = 0 < written < len(line)
        if written < len(line):
            self._warn("the disk is full")

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning("events cannot be written to %s (%s): training continues without them", self._path, why)
