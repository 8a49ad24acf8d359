"""The tensors that only an optimizer's step changes: where they are, and how to copy all of them fast.

Several threads copy, large tensors in pieces and small ones many at a time: a call for each would take longer than its
copy, and so would handing over the interpreter's lock for each. What every save needs is made once, with the plan.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import TypeAlias

import torch

from deepvm.checkpoint.pieces import Pieces
from deepvm.checkpoint.staging import Staging, copy_bytes, copy_small, view_of
from deepvm.store.strips import Strip, cut

SMALL_BYTES, SMALL_COUNT = 64 * 1024, 32 * 1024  # more numbers than that torch would copy with threads of its own
BATCH_BYTES = 2 * 2**20
PIECE_BYTES = 4 * 2**20
COPY_THREADS = min(4, os.cpu_count() or 1)
COPY_S = 600.0  # no copy takes so long

Span: TypeAlias = tuple[int, int, int]  # to, from, length
Job: TypeAlias = Callable[[], object]
_UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # bytes are bytes, whatever they stand for
versions_of = attrgetter("_version")


def is_small(tensor: torch.Tensor) -> bool:
    """Whether a call for its copy alone would take longer than the copy, so that it is copied with others."""
    plain = type(tensor) is torch.Tensor and not tensor.is_complex()
    return plain and tensor.nbytes < SMALL_BYTES and tensor.numel() < SMALL_COUNT


class Copier:
    """Does copies with several threads, the calling one among them; the others start with the first copy."""

    def __init__(self, threads: int = COPY_THREADS) -> None:
        self._threads = threads
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._helpers: list[threading.Thread] = []

    def do(self, jobs: Iterable[Job]) -> None:
        """Returns when all are done; raises what kept one from it."""
        while len(self._helpers) < self._threads - 1:
            self._helpers.append(threading.Thread(target=self._help, name="deepvm-copy", daemon=True))
            self._helpers[-1].start()
        work = _Work(iter(jobs))
        for _ in self._helpers:
            self._work.put(work)
        work.share()
        for _ in self._helpers:
            work.shared.acquire(timeout=COPY_S)
        if work.failure is not None:
            raise work.failure

    def close(self) -> None:
        for _ in self._helpers:
            self._work.put(None)

    def _help(self) -> None:
        while (work := self._work.get()) is not None:
            work.share()
            work.shared.release()
            del work  # it would stay on the trainer's heap until the next one


class _Work:
    """Jobs that several threads share: taking one from the iterator is one step under the GIL."""

    def __init__(self, jobs: Iterator[Job]) -> None:
        self._jobs, self.shared = jobs, threading.Semaphore(0)  # its own: a copy that was interrupted owes nothing
        self.failure: Exception | None = None

    def share(self) -> None:
        try:
            for job in self._jobs:
                job()
        except Exception as error:
            self.failure = error


def _in_pieces(span: Span) -> list[Job]:
    to, source, length = span
    starts = range(0, length, PIECE_BYTES)
    return [partial(copy_bytes, to + at, source + at, min(PIECE_BYTES, length - at)) for at in starts]


def _one_by_one(spans: Sequence[Span]) -> None:
    for to, source, length in spans:
        copy_small(to, source, length)


class Sources:
    """``tensors`` are by entry of the layout; None for those that are staged when a snapshot is taken."""

    def __init__(
        self, pieces: Pieces, tensors: Sequence[torch.Tensor | None], staging: Staging, copier: Copier
    ) -> None:
        self.pieces, self.staging, self._copier = pieces, staging, copier
        self.live = [t is not None for t in tensors]
        self.addresses = [0 if t is None else t.data_ptr() for t in tensors]
        self.tensors = [t for t in tensors if t is not None]
        self.in_chunk = bytearray(
            any(entry >= 0 and self.live[entry] for entry, _, _ in parts) for parts in pieces.parts
        )
        self.locks = [threading.Lock() for _ in range(pieces.count)]  # of chunks, while they are read or move
        self.gate = threading.Event()  # open, unless a copy wants the memory's bandwidth and the cores for itself
        self.gate.set()
        self._marked = [0] * len(self.tensors)  # the tensors' versions, when the last snapshot was taken
        self._strips: dict[tuple[int, bool], list[Strip]] = {}
        self._everything = self._jobs(tensors)
        self._everything_bytes = sum(t.nbytes for t in self.tensors)

    def mark(self) -> None:
        """Remember the tensors as they are now."""
        self._marked[:] = map(versions_of, self.tensors)

    def changed(self) -> bool:
        """Whether torch has seen a change since the last mark."""
        return self._marked != list(map(versions_of, self.tensors))

    def copy_everything(self) -> int:
        """Copy all live tensors to their places in staging memory; the bytes copied."""
        self._copier.do(self._everything)
        return self._everything_bytes

    def copy_chunks(self, chunks: Sequence[int]) -> int:
        """Copy the live parts of some chunks."""
        spans = [
            (self.staging.address + offset, self.address(entry, offset), length)
            for chunk in chunks
            for entry, offset, length in self.pieces.parts[chunk]
            if entry >= 0 and self.live[entry]
        ]
        small = [span for span in spans if span[2] < SMALL_BYTES]
        pieces = [job for span in spans if span[2] >= SMALL_BYTES for job in _in_pieces(span)]
        self._copier.do([partial(_one_by_one, small), *pieces])
        return sum(length for _, _, length in spans)

    def strips(self, chunk: int, *, moved: bool) -> list[Strip]:
        """The memory of a chunk; ``moved``: the copies of live tensors in the place of the tensors. Made once, since
        it takes longer than to send what they show of small tensors. For whoever holds the chunk's lock."""
        found = self._strips.get((chunk, moved))
        if found is None:
            found = self._strips[chunk, moved] = self._make_strips(chunk, moved)
        return found

    def _make_strips(self, chunk: int, moved: bool) -> list[Strip]:
        spans: list[list[int]] = []  # address, length; neighbours joined
        for entry, offset, length in self.pieces.parts[chunk]:
            live = entry >= 0 and self.live[entry] and not moved
            address = self.address(entry, offset) if live else self.staging.address + offset
            if spans and spans[-1][0] + spans[-1][1] == address:
                spans[-1][1] += length
            else:
                spans.append([address, length])
        return cut([view_of(address, length) for address, length in spans])

    def address(self, entry: int, offset: int) -> int:
        return self.addresses[entry] + offset - self.pieces.layout.entries[entry].start

    def _jobs(self, tensors: Sequence[torch.Tensor | None]) -> list[Job]:
        """The copies of all live tensors: those of small ones in batches that are one call each."""
        jobs: list[Job] = []
        copies: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        room = BATCH_BYTES
        for tensor, entry in zip(tensors, self.pieces.layout.entries, strict=True):
            if tensor is None or not tensor.nbytes:
                continue
            if not is_small(tensor):
                jobs += _in_pieces((self.staging.address + entry.start, tensor.data_ptr(), tensor.nbytes))
                continue
            unit = _UNITS.get(tensor.element_size(), torch.int64)
            flat = tensor.detach().reshape(-1).view(unit)
            copies.append(self.staging.tensor(entry.start, unit, tuple(flat.shape)))
            sources.append(flat)
            room -= tensor.nbytes
            if room <= 0:
                jobs.append(partial(torch._foreach_copy_, copies, sources))
                copies, sources, room = [], [], BATCH_BYTES
        return [*jobs, partial(torch._foreach_copy_, copies, sources)] if copies else jobs
