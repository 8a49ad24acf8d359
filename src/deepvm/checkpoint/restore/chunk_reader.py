"""A checkpoint's chunks in a store -> memory: several at once, in order of need, verified.

``select`` reads whole checkpoints with it and ``lazy`` single parameters. A chunk that one tensor, or memory for the
whole checkpoint, covers is received straight into it. Otherwise it is read into a buffer that each thread reuses, and
its parts are copied once they are verified.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeAlias

from deepvm.checkpoint.buffers.priority import lower_priority
from deepvm.checkpoint.buffers.staging import Staging, copy_bytes, view_of
from deepvm.errors import CheckpointError, StoreUnavailable
from deepvm.store.base import Manifest, Store
from deepvm.store.chunk_reads import chunk_buffer
from deepvm.store.chunks import verify_chunk

READERS = 16  # of a store without a preference: object storage and network disks need many large reads at once
MOMENT_S = 0.5  # chunks that need longer are read while the first forward computes
PAUSE_S = 60.0  # the longest wait of a paused reader; ``resume`` wakes it
JOIN_S = 60.0  # the deadlines of a read are shorter

Part: TypeAlias = tuple[int, int, int]  # offset in the file, length, address in memory


class StoreSource:
    """Chunks in a store. Threads may share it."""

    in_memory = False

    def __init__(self, store: Store) -> None:
        self.url, self.readers, self._store = store.url, store.parallel_reads or READERS, store
        self._of_thread = threading.local()  # its buffer

    def read(self, manifest: Manifest, chunk: int, parts: Sequence[Part]) -> None:
        """Read a chunk to the addresses of its parts: directly if one part covers it."""
        offset, length = manifest.span(chunk)
        if len(parts) == 1 and parts[0][:2] == (offset, length):
            self._store.read_chunk(manifest, chunk, view_of(parts[0][2], length))
            return
        if not hasattr(self._of_thread, "buffer"):
            self._of_thread.buffer = chunk_buffer(manifest)
        buffer = self._of_thread.buffer
        self._store.read_chunk(manifest, chunk, buffer[:length])
        scatter(ctypes.addressof(ctypes.c_char.from_buffer(buffer)), offset, parts)


class MappedSource:
    """Chunks of a mapped file: each is verified, and copied if it belongs elsewhere."""

    in_memory = True  # reading takes nothing but a core

    def __init__(self, store: Store, memory: Staging) -> None:
        self.url, self._memory = store.url, memory
        self.readers = (os.cpu_count() or 1) - 1  # the waiting thread reads, too

    def read(self, manifest: Manifest, chunk: int, parts: Sequence[Part]) -> None:
        offset, length = manifest.span(chunk)
        view = self._memory.view[offset : offset + length]
        verify_chunk(manifest, chunk, view, f"{self.url}/{manifest.run}")
        scatter(self._memory.address + offset, offset, parts)


ChunkSource: TypeAlias = StoreSource | MappedSource


class ChunkReader:
    """Reads chunks in ``order``; those that a thread waits for come first. ``place`` returns where the bytes of a chunk
    go; that memory must stay until all have arrived or ``close`` has returned.

    After the first ``eager_count`` chunks the rest is read at lower priority. If it would arrive within a moment, or is
    in memory already, it is paused until ``resume``: reading it takes the cores that the first step computes on.
    """

    def __init__(
        self,
        source: ChunkSource,
        manifest: Manifest,
        place: Callable[[int], Sequence[Part]],
        order: Iterable[int],
        *,
        eager_count: int | None = None,
    ) -> None:
        self._source, self._manifest, self._place = source, manifest, place
        self._waiting = deque(order)
        self._urgent: deque[int] = deque()
        self._claimed = bytearray(len(manifest.digests))
        self._arrived = bytearray(len(manifest.digests))
        self._count = self._left = len(self._waiting)
        self._patient_count = 0 if eager_count is None else self._count - eager_count
        self._may_pause = eager_count is not None
        self._changed = threading.Condition()
        self._awaited: list[set[int]] = []  # for each thread that waits: the chunks that have not arrived
        self._failure: BaseException | None = None
        self._threads: list[threading.Thread] = []
        self._started_s = 0.0

    def start(self) -> None:
        self._started_s = time.monotonic()
        for i in range(min(self._source.readers, self._count)):
            self._threads.append(threading.Thread(target=self._run, name=f"deepvm-read-{i}", daemon=True))
            self._threads[-1].start()

    def has(self, chunks: Iterable[int]) -> bool:
        return all(self._arrived[chunk] for chunk in chunks)

    def wait(self, chunks: Collection[int], timeout_s: float) -> None:
        """Wait until these have arrived and are verified. Raises the failure of any chunk: a state that lacks a part is
        of no use."""
        if self._failure is None and self.has(chunks):
            return
        with self._changed:
            missing = {chunk for chunk in chunks if not self._arrived[chunk]}
            self._urgent += [chunk for chunk in chunks if not self._claimed[chunk]]
            self._awaited.append(missing)
            self._changed.notify_all()
        try:
            self._wait(lambda: not missing, timeout_s, urgent_only=True)
        finally:
            with self._changed:
                self._awaited = [other for other in self._awaited if other is not missing]

    def resume(self) -> None:
        """Read the rest, too."""
        with self._changed:
            self._may_pause = False
            self._changed.notify_all()

    def wait_all(self, timeout_s: float) -> None:
        self.resume()
        self._wait(lambda: self._left == 0, timeout_s, urgent_only=False)

    def close(self) -> None:
        """Stop. Nothing is written into any tensor's memory afterwards."""
        with self._changed:
            if self._left and self._failure is None:
                self._failure = CheckpointError("the restore was given up")
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(JOIN_S)

    def _wait(self, arrived: Callable[[], bool], timeout_s: float, *, urgent_only: bool) -> None:
        if self._source.in_memory:  # this thread has a core: a reader more would have to wait for it, for milliseconds
            while (chunk := self._next(urgent_only=urgent_only)) is not None:
                self._read(chunk)
        with self._changed:
            in_time = self._changed.wait_for(lambda: self._failure is not None or arrived(), timeout_s)
            if self._failure is not None:
                raise self._failure
        if not in_time:
            raise StoreUnavailable(f"step {self._manifest.step} did not arrive within {timeout_s:g} s")

    # --- readers ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        patient = False
        while (chunk := self._next()) is not None:
            if not patient and self._left <= self._patient_count:
                patient = True
                lower_priority()  # the first step does not need these, but the cores
            self._read(chunk)

    def _next(self, *, urgent_only: bool = False) -> int | None:
        """Claim the next chunk; None if there is none left."""
        with self._changed:
            while self._failure is None:
                queue = self._urgent
                if not queue and not urgent_only:
                    queue = self._waiting
                    if queue and self._is_paused():
                        self._changed.wait(PAUSE_S)
                        continue
                if not queue:
                    return None
                chunk = queue.popleft()
                if not self._claimed[chunk]:
                    self._claimed[chunk] = 1
                    return chunk
            return None

    def _is_paused(self) -> bool:
        """True if only patient chunks are left, and these would arrive within a moment, as fast as the others did."""
        if not self._may_pause or len(self._waiting) > self._patient_count:
            return False
        arrived = self._count - self._left
        self._may_pause = self._source.in_memory or (
            arrived > 0 and len(self._waiting) * (time.monotonic() - self._started_s) / arrived < MOMENT_S
        )
        return self._may_pause

    def _read(self, chunk: int) -> None:
        """Read a claimed chunk, or record the failure."""
        try:
            self._source.read(self._manifest, chunk, self._place(chunk))
        except BaseException as error:
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()
            return
        with self._changed:
            self._arrived[chunk] = 1
            self._left -= 1
            for missing in self._awaited:
                missing.discard(chunk)
            if self._left == 0 or not all(self._awaited):  # a thread has all chunks that it waits for
                self._changed.notify_all()


def scatter(source: int, offset: int, parts: Sequence[Part]) -> None:
    """Copy parts of the file to their addresses. The bytes from ``offset`` on are in memory at ``source``."""
    for start, length, address in parts:
        if address != source + start - offset:
            copy_bytes(address, source + start - offset, length)
