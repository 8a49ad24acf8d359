"""The tensors that only an optimizer's step changes: where they are, what is read in place, and how the rest is copied.

Input: the plan's tensors. Output, at each save: all bytes that cannot be watched are in staging memory, and all others
are protected, so that a write to them is noticed. What every save needs is made once, with the plan.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress

import torch

from deepvm.checkpoint.buffers.copying import ALONE_BYTES, ONE_CALL_BYTES, Copier, Span, Work, copy_jobs, is_small
from deepvm.checkpoint.buffers.off_heap import run_off_heap
from deepvm.checkpoint.buffers.staging import Staging
from deepvm.checkpoint.buffers.tensor_marks import address_of, numbers, storage_bytes
from deepvm.checkpoint.buffers.write_watch import Range, WriteWatch
from deepvm.checkpoint.snapshot.live_pages import LivePages
from deepvm.checkpoint.snapshot.live_parts import LiveParts, Part
from deepvm.checkpoint.state.chunk_map import ChunkMap
from deepvm.errors import CheckpointError


class LiveTensors:
    """``tensors`` are by entry of the layout; None for those that are not an optimizer's. They are held, and with them
    the memory that a save reads, even if a parameter gets other memory meanwhile (``p.data = other``). Without a
    ``watch`` all of them are copied at every save."""

    def __init__(
        self,
        chunk_map: ChunkMap,
        tensors: Sequence[torch.Tensor | None],
        staging: Staging,
        copier: Copier,
        watch: WriteWatch | None,
    ) -> None:
        self.chunk_map, self.staging, self._copier = chunk_map, staging, copier
        self.addresses = [None if t is None else t.data_ptr() for t in tensors]
        self._held = [t.detach() for t in tensors if t is not None]
        self._storages = [t.untyped_storage() for t in self._held]
        self._marks = numbers(address_of, self._held), numbers(storage_bytes, self._storages)
        self.locks = [threading.Lock() for _ in range(chunk_map.count)]  # of chunks, while they are read or move
        self.gate = threading.Event()  # open, unless a copy wants the memory's bandwidth and the cores for itself
        self.gate.set()
        self._large: list[Part] = []
        self._small: list[Span] = []
        for tensor, entry in zip(tensors, chunk_map.layout.entries, strict=True):
            if tensor is not None and entry.bytes:
                if is_small(tensor):
                    self._small.append((staging.address + entry.start, tensor.data_ptr(), entry.bytes))
                else:
                    self._large.append(Part(entry.start, tensor.data_ptr(), entry.bytes))
        self.pages = None if watch is None else LivePages(watch, self._held)
        self.in_place = LiveParts(chunk_map, staging, self._large, ())
        self._make_copies()
        self._copying: Work | None = None

    def begin(self, *, live: bool = True) -> None:
        """Protect what can be, and begin to copy all else. ``live``: False to copy everything. Only if the tensors are
        ``unmoved``: one may have got other memory since the last save (by ``share_memory_``), and what it had may be
        unmapped."""
        protected: tuple[Range, ...] = self.pages.protect() if live and self.pages is not None else ()
        if protected != self.in_place.ranges:
            self.in_place = run_off_heap(lambda: LiveParts(self.chunk_map, self.staging, self._large, protected))
            run_off_heap(self._make_copies)
        if self._few:
            self._copier.do(self._copies, alone=True)
        else:
            self._copying = self._copier.start(self._copies)

    def unmoved(self) -> bool:
        """True if the tensors that are held have the memory for which this was planned."""
        return (numbers(address_of, self._held), numbers(storage_bytes, self._storages)) == self._marks

    def finish(self) -> None:
        """Return when what ``begin`` copies is in staging memory. Raises if another thread gave a tensor other memory
        meanwhile: what was copied may be anything."""
        self._wait()
        if not self.unmoved():
            raise CheckpointError("the memory of a tensor was freed (it was shared or resized) while save() copied it")

    def _wait(self) -> None:
        copying, self._copying = self._copying, None
        if copying is not None:
            self._copier.finish(copying)

    def abandon(self) -> None:
        """Give up a save: nothing is copied or protected after this."""
        with suppress(Exception):  # the error that ended the save is reported
            self._wait()
        self.unprotect()

    def untouched(self, chunk: int) -> bool:
        """True if what a chunk has in place is as it was at ``begin``."""
        return self.pages is None or self.pages.untouched(self.in_place.pages_of(chunk))

    def unprotect(self) -> None:
        if self.pages is not None:
            self.pages.unprotect()

    def mend(self) -> None:
        """Between saves: let more of the memory be read in place."""
        if self.pages is not None:
            self.pages.mend()

    def copy_chunks(self, chunks: Sequence[int]) -> None:
        """Copy what some chunks have in place into staging memory; that of all chunks if these are nearly all."""
        if len(chunks) >= 0.9 * sum(self.in_place.in_chunk):
            self._copier.do(self.in_place.copy_all)
        else:
            jobs, size_bytes = self.in_place.copy_chunks(chunks)
            self._copier.do(jobs, alone=size_bytes <= ALONE_BYTES)

    def close(self) -> None:
        """Release the pages for their next watcher."""
        self._wait()
        if self.pages is not None:
            self.pages.close()

    def _make_copies(self) -> None:
        """Plan the copies of all that is not in place. Few bytes are copied without waiting for another thread."""
        spans = [*self._small, *self.in_place.rest]
        self._copies, self._few = copy_jobs(spans), sum(length for _, _, length in spans) <= ONE_CALL_BYTES
