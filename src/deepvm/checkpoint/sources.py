"""The tensors that only an optimizer's step changes: where they are, and how to copy all of them fast.

Large ones are copied by several threads. Small ones that lie side by side in the file are gathered by one call of
torch, since calling anything a thousand times from Python takes longer than the copy.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator, Sequence
from operator import attrgetter

import torch

from deepvm.checkpoint.layout import DTYPES
from deepvm.checkpoint.pieces import Pieces
from deepvm.checkpoint.staging import Staging, copy_bytes

SMALL_BYTES = 256 * 1024
PIECE_BYTES = 4 * 2**20
COPY_THREADS = min(4, os.cpu_count() or 1)
COPY_S = 600.0  # no copy takes so long

Span = tuple[int, int, int]  # to, from, length
versions_of = attrgetter("_version")


class Copier:
    """Copies spans of memory with several threads, the calling one among them."""

    def __init__(self, threads: int = COPY_THREADS) -> None:
        self._work: queue.SimpleQueue[tuple[Iterator[Span], threading.Semaphore] | None] = queue.SimpleQueue()
        self._helpers = [
            threading.Thread(target=self._help, name="deepvm-copy", daemon=True) for _ in range(threads - 1)
        ]
        for helper in self._helpers:
            helper.start()

    def copy(self, spans: Sequence[Span]) -> None:
        pieces = iter(
            [
                (to + at, source + at, min(PIECE_BYTES, length - at))
                for to, source, length in spans
                for at in range(0, length, PIECE_BYTES)
            ]
        )
        done = threading.Semaphore(0)
        for _ in self._helpers:
            self._work.put((pieces, done))
        _copy_all(pieces)
        for _ in self._helpers:
            done.acquire(timeout=COPY_S)

    def close(self) -> None:
        for _ in self._helpers:
            self._work.put(None)

    def _help(self) -> None:
        while (work := self._work.get()) is not None:
            pieces, done = work
            _copy_all(pieces)
            done.release()


def _copy_all(pieces: Iterator[Span]) -> None:
    for to, source, length in pieces:  # one iterator for all threads: taking from it is one step under the GIL
        copy_bytes(to, source, length)


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
        entries = pieces.layout.entries
        self._large = [i for i, t in enumerate(tensors) if t is not None and entries[i].bytes >= SMALL_BYTES]
        self._gathered = list(_gather(pieces, tensors, staging))

    def versions(self) -> list[int]:
        return list(map(versions_of, self.tensors))

    def copy_everything(self) -> int:
        """Copy all live tensors to their places in staging memory."""
        entries, base = self.pieces.layout.entries, self.staging.address
        self._copier.copy([(base + entries[i].start, self.addresses[i], entries[i].bytes) for i in self._large])
        for flat, out in self._gathered:
            torch.cat(flat, out=out)
        return sum(entries[i].bytes for i, live in enumerate(self.live) if live)

    def copy_chunks(self, chunks: Sequence[int]) -> int:
        """Copy the live parts of some chunks."""
        spans = [
            (self.staging.address + offset, self.address(entry, offset), length)
            for chunk in chunks
            for entry, offset, length in self.pieces.parts[chunk]
            if entry >= 0 and self.live[entry]
        ]
        self._copier.copy(spans)
        return sum(length for _, _, length in spans)

    def address(self, entry: int, offset: int) -> int:
        return self.addresses[entry] + offset - self.pieces.layout.entries[entry].start


def _gather(
    pieces: Pieces, tensors: Sequence[torch.Tensor | None], staging: Staging
) -> Iterator[tuple[list[torch.Tensor], torch.Tensor]]:
    """Runs of small neighbours of one type: their flat views, and the part of staging memory that they fill."""
    entries = pieces.layout.entries
    run: list[int] = []
    for i in [*range(len(entries)), None]:
        small = i is not None and tensors[i] is not None and 0 < entries[i].bytes < SMALL_BYTES
        if run and (i is None or not small or entries[i].dtype != entries[run[-1]].dtype):
            dtype = DTYPES[entries[run[0]].dtype]
            count = sum(entries[j].bytes for j in run) // dtype.itemsize
            flat = [t.detach().reshape(-1) for j in run if (t := tensors[j]) is not None]
            yield flat, staging.tensor(entries[run[0]].start, dtype, (count,))
            run = []
        if small and i is not None:
            run.append(i)
