"""The tensors that only an optimizer's step changes: where they are, what is read in place, and how the rest is copied.

Input: the plan's tensors. Output, at each save: all bytes that cannot be watched are in staging memory, and all others
are protected, so that a write to them is noticed. What every save needs is made once, with the plan.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import torch

from deepvm.checkpoint.buffers.copying import (
    ALONE_BYTES,
    BATCH,
    ONE_CALL_BYTES,
    SMALL_BYTES,
    Copier,
    CopyJob,
    Span,
    Work,
    copy_one_by_one,
    in_pieces,
    is_small,
)
from deepvm.checkpoint.buffers.off_heap import run_off_heap
from deepvm.checkpoint.buffers.staging import Staging
from deepvm.checkpoint.buffers.write_watch import Range, WriteWatch
from deepvm.checkpoint.snapshot.live_pages import LivePages
from deepvm.checkpoint.snapshot.live_parts import LiveParts, Part
from deepvm.checkpoint.state.chunk_map import ChunkMap


class Sources:
    """``tensors`` are by entry of the layout; None for those that are not an optimizer's. They are held, and with them
    the memory that a save reads, whatever memory their parameters are given meanwhile (``p.data = other``). Without a
    ``watch`` all of them are copied at every save."""

    def __init__(
        self,
        pieces: ChunkMap,
        tensors: Sequence[torch.Tensor | None],
        staging: Staging,
        copier: Copier,
        watch: WriteWatch | None,
    ) -> None:
        self.pieces, self.staging, self._copier = pieces, staging, copier
        self.live = [t is not None for t in tensors]
        self.addresses = [0 if t is None else t.data_ptr() for t in tensors]
        self._held = [t.detach() for t in tensors if t is not None]
        self.locks = [threading.Lock() for _ in range(pieces.count)]  # of chunks, while they are read or move
        self.gate = threading.Event()  # open, unless a copy wants the memory's bandwidth and the cores for itself
        self.gate.set()
        self._large: list[Part] = []
        self._small: list[Span] = []
        for tensor, entry in zip(tensors, pieces.layout.entries, strict=True):
            if tensor is not None and entry.bytes:
                if is_small(tensor):
                    self._small.append((staging.address + entry.start, tensor.data_ptr(), entry.bytes))
                else:
                    self._large.append(Part(entry.start, tensor.data_ptr(), entry.bytes))
        self.pages = None if watch is None else LivePages(watch, self._held)
        self.in_place = LiveParts(pieces, staging, self._large, ())
        self._copies = self._copies_at_save()
        self._copying: Work | None = None

    def begin(self, *, live: bool = True) -> None:
        """Protect what can be, and begin to copy all else. ``live``: False to copy everything."""
        protected: tuple[Range, ...] = self.pages.protect() if live and self.pages is not None else ()
        if protected != self.in_place.ranges:
            self.in_place = run_off_heap(lambda: LiveParts(self.pieces, self.staging, self._large, protected))
            self._copies = run_off_heap(self._copies_at_save)
        if len(self._copies) > 1:
            self._copying = self._copier.start(self._copies)
        else:
            self._copier.do(self._copies, alone=True)

    def finish(self) -> None:
        """Return when what ``begin`` copies is in staging memory."""
        copying, self._copying = self._copying, None
        if copying is not None:
            self._copier.finish(copying)

    def abandon(self) -> None:
        """Give up a save that was begun: nothing is copied or protected after this."""
        with suppress(Exception):  # what ended the save is told, and not what else went wrong
            self.finish()
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

    def copy_everything(self) -> int:
        """Copy all that is in place into staging memory; the bytes copied."""
        self._copier.do(self.in_place.copy_all)
        return self.in_place.bytes

    def copy_chunks(self, chunks: Sequence[int]) -> int:
        """The same for some chunks."""
        jobs, size_bytes = self.in_place.copy_chunks(chunks)
        self._copier.do(jobs, alone=size_bytes <= ALONE_BYTES)
        return size_bytes

    def close(self) -> None:
        """Let go of the pages, for whoever watches them next."""
        self.finish()
        if self.pages is not None:
            self.pages.close()

    def _copies_at_save(self) -> list[CopyJob]:
        """The copies of all that is not in place. Few bytes are one call, for which no other thread is waited for."""
        rest, size_bytes = self.in_place.rest, self.in_place.rest_bytes + sum(length for _, _, length in self._small)
        small = [*self._small, *(span for span in rest if span[2] < SMALL_BYTES)]
        large = [job for span in rest if span[2] >= SMALL_BYTES for job in in_pieces(span)]
        if size_bytes <= ONE_CALL_BYTES:
            return [partial(_copy_alone, [partial(copy_one_by_one, small), *large])]
        return [*large, *(partial(copy_one_by_one, small[at : at + BATCH]) for at in range(0, len(small), BATCH))]


def _copy_alone(jobs: Sequence[CopyJob]) -> None:
    for job in jobs:
        job()
