"""The chunks of one checkpoint on their way from a store into memory: several at once, what is waited for first.

Where one tensor, or memory set aside for the whole checkpoint, covers a chunk, it is received straight into it.
Otherwise the chunk comes into a buffer that stays warm, and each tensor's part of it is copied once it is verified.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol, TypeAlias

from deepvm.checkpoint.buffers.priority import lower_priority
from deepvm.checkpoint.buffers.staging import Staging, copy_bytes, view_of
from deepvm.errors import CheckpointError, StoreUnavailable
from deepvm.store.base import Manifest, Store
from deepvm.store.chunk_reads import chunk_buffer
from deepvm.store.chunks import verify_chunk

READERS = 16  # of a store without a preference: object storage and network disks want many large reads at once
MOMENT_S = 0.5  # what comes later than that keeps coming while the first forward computes
HELD_S = 60.0  # how often a reader that is held looks up; whoever lets it go wakes it
JOIN_S = 60.0  # a read has deadlines of its own, which are shorter
_GIVEN_UP = "it was given up"

Part: TypeAlias = tuple[int, int, int]  # offset in the file, length, address in memory
Place: TypeAlias = Callable[[int], Sequence[Part]]


class ChunkSource(Protocol):
    """Brings chunks into memory, verified."""

    url: str
    readers: int  # threads
    in_memory: bool  # chunks are in memory already, and bringing one takes nothing but a core

    def bring(self, manifest: Manifest, chunk: int, parts: Sequence[Part]) -> None:
        """Bring a chunk to the places of its parts. Threads may share a source."""
        ...


class StoreSource:
    """Chunks that are read from a store: straight into their place where one part covers the chunk."""

    in_memory = False

    def __init__(self, store: Store) -> None:
        self.url, self.readers, self._store = store.url, store.parallel_reads or READERS, store
        self._of_thread = threading.local()  # its buffer, which stays warm

    def bring(self, manifest: Manifest, chunk: int, parts: Sequence[Part]) -> None:
        offset, length = manifest.span(chunk)
        if len(parts) == 1 and parts[0][:2] == (offset, length):
            self._store.read_chunk(manifest, chunk, view_of(parts[0][2], length))
            return
        if not hasattr(self._of_thread, "buffer"):
            self._of_thread.buffer = chunk_buffer(manifest)
        buffer = self._of_thread.buffer
        self._store.read_chunk(manifest, chunk, buffer[:length])
        _scatter(ctypes.addressof(ctypes.c_char.from_buffer(buffer)), offset, parts)


class MappedSource:
    """Chunks of a file that is mapped: each is verified, and copied to where it is not yet."""

    in_memory = True

    def __init__(self, store: Store, memory: Staging) -> None:
        self.url, self._memory = store.url, memory
        self.readers = (os.cpu_count() or 1) - 1  # the thread that waits is another one

    def bring(self, manifest: Manifest, chunk: int, parts: Sequence[Part]) -> None:
        offset, length = manifest.span(chunk)
        view = self._memory.view[offset : offset + length]
        verify_chunk(manifest, chunk, view, f"{self.url}/{manifest.run}")
        _scatter(self._memory.address + offset, offset, parts)


class ChunkReader:
    """Fetches chunks in ``order``; those that somebody waits for come before the others. ``place`` tells where the
    bytes of a chunk go; memory there must stay until all has arrived or ``close`` has returned. After the
    ``eager_count`` first ones the rest is fetched at lower priority. If it comes within a moment, it is left alone
    until ``resume``: bytes that come so fast, and those that are in memory already, take nothing but the cores that the
    first step computes on."""

    def __init__(
        self,
        source: ChunkSource,
        manifest: Manifest,
        place: Place,
        order: Iterable[int],
        *,
        eager_count: int | None = None,
    ) -> None:
        self._source, self._manifest, self._place = source, manifest, place
        self._waiting = deque(order)
        self._urgent: deque[int] = deque()
        self._taken = bytearray(len(manifest.digests))
        self._there = bytearray(len(manifest.digests))
        self._left = len(self._waiting)
        self._rest = 0 if eager_count is None else self._left - eager_count  # how many are not hurried
        self._held = eager_count is not None
        self._began_s, self._all = time.monotonic(), self._left
        self._changed = threading.Condition()
        self._missing: list[set[int]] = []  # of each that somebody waits for: those that are not there
        self._failure: BaseException | None = None
        count = min(source.readers, self._left)
        self._threads = [
            threading.Thread(target=self._read, name=f"deepvm-read-{i}", daemon=True) for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def finished(self) -> bool:
        return self._left == 0

    def has(self, chunks: Iterable[int]) -> bool:
        return all(self._there[chunk] for chunk in chunks)

    def wait(self, chunks: Collection[int], timeout_s: float) -> None:
        """Until these are there and verified. Raises what keeps any chunk from coming: a state that lacks a part is
        not worth waiting for another."""
        if self._failure is None and self.has(chunks):
            return
        with self._changed:
            missing = {chunk for chunk in chunks if not self._there[chunk]}
            self._urgent += [chunk for chunk in chunks if not self._taken[chunk]]
            self._missing.append(missing)
            self._changed.notify_all()
        self._help(self._next_urgent)
        with self._changed:
            there = self._changed.wait_for(lambda: self._failure is not None or not missing, timeout_s)
            self._missing = [other for other in self._missing if other is not missing]
            if self._failure is not None:
                raise self._failure
        if not there:
            raise StoreUnavailable(f"a part of step {self._manifest.step} did not come within {timeout_s:g} s")

    def resume(self) -> None:
        """Bring the rest, too."""
        with self._changed:
            self._held = False
            self._changed.notify_all()

    def wait_all(self, timeout_s: float) -> None:
        self.resume()
        self._help(self._next)
        with self._changed:
            there = self._changed.wait_for(lambda: self._failure is not None or self.finished, timeout_s)
            if self._failure is not None:
                raise self._failure
        if not there:
            raise StoreUnavailable(f"step {self._manifest.step} did not come whole within {timeout_s:g} s")

    def close(self) -> None:
        """Nothing is written into anybody's memory after this."""
        with self._changed:
            if not self.finished and self._failure is None:
                self._failure = CheckpointError(_GIVEN_UP)
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(JOIN_S)

    # --- readers ------------------------------------------------------------------------------------------------

    def _next(self) -> int | None:
        with self._changed:
            while self._failure is None:
                if self._held and not self._urgent and 0 < len(self._waiting) <= self._rest:
                    if self._comes_fast():
                        self._changed.wait(HELD_S)
                        continue
                    self._held = False
                queue = self._urgent or self._waiting
                if not queue:
                    return None
                if (chunk := self._pop(queue)) is not None:
                    return chunk
            return None

    def _next_urgent(self) -> int | None:
        with self._changed:
            while self._urgent:
                if (chunk := self._pop(self._urgent)) is not None:
                    return chunk
            return None

    def _pop(self, queue: deque[int]) -> int | None:
        """The first of a queue, if nobody has taken it yet."""
        chunk = queue.popleft()
        if self._taken[chunk]:
            return None
        self._taken[chunk] = 1
        return chunk

    def _comes_fast(self) -> bool:
        """Whether what is waiting would be there within a moment, if it came as the others have."""
        if self._source.in_memory:
            return True
        come = self._all - self._left
        return come > 0 and len(self._waiting) * (time.monotonic() - self._began_s) / come < MOMENT_S

    def _read(self) -> None:
        patient = False
        while (chunk := self._next()) is not None:
            if not patient and self._left <= self._rest:
                patient = True
                lower_priority()  # nobody needs it yet: the first step keeps its cores
            self._bring(chunk)

    def _help(self, take: Callable[[], int | None]) -> None:
        """What is in memory already takes nothing but a core, and whoever waits has one to give: a reader more would
        keep it waiting for its turn, for milliseconds."""
        if self._source.in_memory:
            while self._failure is None and (chunk := take()) is not None:
                self._bring(chunk)

    def _bring(self, chunk: int) -> None:
        """Bring a chunk to its place, or record the failure."""
        try:
            self._source.bring(self._manifest, chunk, self._place(chunk))
        except BaseException as error:
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()
            return
        with self._changed:
            self._there[chunk] = 1
            self._left -= 1
            for missing in self._missing:
                missing.discard(chunk)
            if self.finished or not all(self._missing):  # somebody has all that was waited for
                self._changed.notify_all()


def _scatter(source: int, offset: int, parts: Sequence[Part]) -> None:
    """Copy the parts of a chunk, which begins at an offset in the file and lies at an address, to their places."""
    for start, length, address in parts:
        if address != source + start - offset:
            copy_bytes(address, source + start - offset, length)
