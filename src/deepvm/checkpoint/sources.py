"""The tensors that only an optimizer's step changes: where they are, and how to copy all of them fast.

Large ones are copied by several threads. Small ones are copied by one that does not let go of the interpreter's lock:
handing it over takes longer than the copy.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator, Sequence
from operator import attrgetter

import torch

from deepvm.checkpoint.pieces import Pieces
from deepvm.checkpoint.staging import Staging, copy_bytes, copy_small

SMALL_BYTES = 64 * 1024
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

    def copy(self, spans: Sequence[Span]) -> int:
        """Copy all spans; the bytes copied."""
        pieces = iter(
            [
                (to + at, source + at, min(PIECE_BYTES, length - at))
                for to, source, length in spans
                if length >= SMALL_BYTES
                for at in range(0, length, PIECE_BYTES)
            ]
        )
        done = threading.Semaphore(0)
        for _ in self._helpers:
            self._work.put((pieces, done))
        copied = 0
        for to, source, length in spans:
            copied += length
            if length < SMALL_BYTES:
                copy_small(to, source, length)
        _copy_all(pieces)
        for _ in self._helpers:
            done.acquire(timeout=COPY_S)
        return copied

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
        self._everything = [
            (staging.address + entry.start, address, entry.bytes)
            for entry, address in zip(pieces.layout.entries, self.addresses, strict=True)
            if address
        ]

    def versions(self) -> list[int]:
        return list(map(versions_of, self.tensors))

    def copy_everything(self) -> int:
        """Copy all live tensors to their places in staging memory."""
        return self._copier.copy(self._everything)

    def copy_chunks(self, chunks: Sequence[int]) -> int:
        """Copy the live parts of some chunks."""
        spans = [
            (self.staging.address + offset, self.address(entry, offset), length)
            for chunk in chunks
            for entry, offset, length in self.pieces.parts[chunk]
            if entry >= 0 and self.live[entry]
        ]
        return self._copier.copy(spans)

    def address(self, entry: int, offset: int) -> int:
        return self.addresses[entry] + offset - self.pieces.layout.entries[entry].start
