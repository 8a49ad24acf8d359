"""What a trainer tells of itself while it runs: a line for each event, in the file that DEEPVM_EVENTS names.

Lines are those of ``deepvm.events``. Each is one write to the end of the file, so that several processes can
share it. Whatever is wrong with the file, training goes on.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from typing import Any

from deepvm.checkpoint.handle import SaveHandle, State
from deepvm.checkpoint.restore.select import Restored

log = logging.getLogger("deepvm.checkpoint")


class EventLog:
    """Rank 0 tells of steps and of saves; every rank of what it restored, and of saves that are committed."""

    def __init__(self, path: str | None, rank: int, world_size: int) -> None:
        self._path, self._rank, self._world_size = path, rank, world_size
        self._lock = threading.Lock()
        self._file: int | None = None
        self._half_a_line = self._complained = False
        self._last_skip: str | None = None

    def restored(self, what: Restored, seconds: float) -> None:
        where = {"place": what.origin, "fetched": what.fetched}
        self._tell("restored", step=what.step, seconds=seconds, rank=self._rank, **where)

    def stepped(self, step: int, seconds: float) -> None:
        if self._rank == 0:
            self._tell("step", step=step, seconds=seconds, world_size=self._world_size)

    def saved(
        self, handle: SaveHandle, state: State, *, place: str | None = None, why: str | None = None, first: bool = False
    ) -> None:
        """What became of a save. Those that are skipped one after another, for one reason, are told once; of those that
        failed, ``first`` marks the first for a reason, which people are shown."""
        if self._path is None or (self._rank != 0 and state != "remote"):
            return
        if state == "skipped" and why == self._last_skip:
            return
        self._last_skip = why if state == "skipped" else None
        self._tell(
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

    def _tell(self, kind: str, **data: Any) -> None:
        if self._path is None:
            return
        line = json.dumps({"at_s": time.time(), "kind": kind, "machine": None, **data}).encode() + b"\n"
        with self._lock:
            try:
                self._append(line)
            except OSError as error:
                self._complain(error.strerror or str(error))

    def _append(self, line: bytes) -> None:
        if self._path is None:  # closed meanwhile
            return
        if self._file is None:
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if self._half_a_line:
            line = b"\n" + line
        written = os.write(self._file, line)
        self._half_a_line = 0 < written < len(line)
        if written < len(line):
            self._complain("the disk is full")

    def _complain(self, why: str) -> None:
        if not self._complained:
            self._complained = True
            log.warning("events cannot be written to %s (%s): training goes on without", self._path, why)
