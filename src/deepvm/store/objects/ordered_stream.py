"""Order chunks for an upload: in any order and from many threads in, in order out, within a memory budget.

Chunks wait for the ones before them. Over the budget, ``add`` waits. Only if the next chunk has not arrived, so that
waiting could last for ever, chunks are spilled to an unnamed file.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO

from deepvm.errors import StoreError, StoreUnavailable
from deepvm.units import format_bytes


class OrderedStream:
    def __init__(self, chunks: int, *, budget_bytes: int, stall_s: float) -> None:
        self._chunks, self._budget_bytes, self._stall_s = chunks, budget_bytes, stall_s
        self._held: dict[int, bytes] = {}
        self._held_bytes = 0
        self._spilled: dict[int, tuple[int, int]] = {}  # offset and length in the file
        self._spill: IO[bytes] | None = None
        self._spill_end = 0
        self._next = 0
        self._sealed = False
        self._failure: BaseException | None = None
        self._changed = threading.Condition()

    @property
    def taken(self) -> int:
        return self._next

    def add(self, chunk: int, data: bytes) -> None:
        """Add a chunk; wait while the budget is used up and the stream flows."""
        with self._changed:
            self._wait_for_room(chunk, len(data))
            if chunk in self._held or chunk in self._spilled or chunk < self._next:
                raise StoreError(f"chunk {chunk} was put twice")
            if chunk == self._next or self._held_bytes + len(data) <= self._budget_bytes:
                self._held[chunk] = data
                self._held_bytes += len(data)
            else:
                self._spill_chunk(chunk, data)
            self._changed.notify_all()

    def stream(self) -> Iterator[bytes]:
        """Yield the chunks in order; end once sealed, raise the reason once stopped."""
        for chunk in range(self._chunks):
            yield self._take(chunk)
        with self._changed:
            self._wait(lambda: self._sealed, "it was not published after its last chunk")

    def seal(self) -> None:
        with self._changed:
            self._sealed = True
            self._changed.notify_all()

    def stop(self, failure: BaseException) -> None:
        """End the stream and every wait; the first reason is kept."""
        with self._changed:
            self._failure = self._failure or failure
            self._held.clear()
            self._spilled.clear()
            if self._spill is not None:
                self._spill.close()
                self._spill = None
            self._changed.notify_all()

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _wait_for_room(self, chunk: int, length: int) -> None:
        deadline = time.monotonic() + self._stall_s
        seen = self._next
        while True:
            self.check()
            flows = self._next in self._held or self._next in self._spilled
            if chunk <= self._next or self._held_bytes + length <= self._budget_bytes or not flows:
                return
            if self._next != seen:
                seen, deadline = self._next, time.monotonic() + self._stall_s
            if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                raise StoreUnavailable(
                    f"the upload took none of {format_bytes(self._held_bytes)} within {self._stall_s:g} s"
                )

    def _take(self, chunk: int) -> bytes:
        with self._changed:
            self._wait(lambda: chunk in self._held or chunk in self._spilled, f"chunk {chunk} did not arrive")
            if chunk in self._held:
                data = self._held.pop(chunk)
                self._held_bytes -= len(data)
            else:
                data = self._read_back(*self._spilled.pop(chunk))
            self._next = chunk + 1
            self._changed.notify_all()
            return data

    def _wait(self, ready: Callable[[], bool], problem: str) -> None:
        if not self._changed.wait_for(lambda: self._failure is not None or ready(), self._stall_s):
            raise StoreUnavailable(f"the upload was abandoned: {problem} within {self._stall_s:g} s")
        self.check()

    def _spill_chunk(self, chunk: int, data: bytes) -> None:
        try:
            if self._spill is None:
                self._spill = tempfile.TemporaryFile(prefix="deepvm-upload-")  # noqa: SIM115 - lives as long as this
            self._spill.seek(self._spill_end)
            self._spill.write(data)
        except OSError as error:
            raise StoreUnavailable(
                f"{tempfile.gettempdir()} has no room for chunks that arrived early ({error.strerror}): "
                "put chunks in order, raise the memory budget, or set TMPDIR"
            ) from error
        self._spilled[chunk] = (self._spill_end, len(data))
        self._spill_end += len(data)

    def _read_back(self, offset: int, length: int) -> bytes:
        assert self._spill is not None  # noqa: S101 - the chunk was spilled into it
        self._spill.seek(offset)
        return self._spill.read(length)
