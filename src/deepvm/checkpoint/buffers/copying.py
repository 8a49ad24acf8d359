"""Copies with several threads: large memory in pieces, small tensors one after the other.

To hand over the interpreter's lock for each small tensor, or to call torch for it, would take longer than its copy.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

import torch

from deepvm.checkpoint.buffers.staging import copy_bytes, copy_small
from deepvm.errors import CheckpointError

SMALL_BYTES, SMALL_COUNT = 64 * 1024, 32 * 1024  # more numbers than that torch would copy with threads of its own
BATCH = 1000  # small tensors that one thread copies before another gets its turn
PIECE_BYTES = 4 * 2**20
ALONE_BYTES = 4 * 2**20  # less is copied before another thread would begin
ONE_CALL_BYTES = 16 * 2**20  # more is shared by several threads, which begin when they get a core
COPY_THREADS = min(4, os.cpu_count() or 1)
COPY_S = 600.0  # no copy takes so long

Span: TypeAlias = tuple[int, int, int]  # to, from, length
CopyJob: TypeAlias = Callable[[], object]


def is_small(tensor: torch.Tensor) -> bool:
    """Whether a call for its copy alone would take longer than the copy, so that it is copied with others."""
    plain = type(tensor) is torch.Tensor and not tensor.is_complex()
    return plain and tensor.nbytes < SMALL_BYTES and tensor.numel() < SMALL_COUNT


class Copier:
    """Does copies with several threads, the calling one among them; the others start with the first copy."""

    def __init__(self, threads: int = COPY_THREADS) -> None:
        self._threads = threads
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._helpers: list[threading.Thread] = []

    def do(self, jobs: Sequence[CopyJob], *, alone: bool = False) -> None:
        """Return when all are done, or raise what kept one from it. ``alone``: with the calling thread only."""
        if alone:
            for job in jobs:
                job()
            return
        self.finish(self.start(jobs))

    def start(self, jobs: Sequence[CopyJob]) -> Work:
        """Let the other threads begin."""
        while len(self._helpers) < self._threads - 1:
            self._helpers.append(threading.Thread(target=self._help, name="deepvm-copy", daemon=True))
            self._helpers[-1].start()
        work = Work(iter(jobs))
        for _ in self._helpers:
            self._work.put(work)
        return work

    def finish(self, work: Work) -> None:
        """Take part until all is done."""
        work.share()
        for _ in self._helpers:
            if not work.shared.acquire(timeout=COPY_S):
                raise CheckpointError(f"a copy of the state did not end within {COPY_S:g} s: the save is given up")
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


class Work:
    """Jobs that several threads share: taking one from the iterator is one step under the GIL."""

    def __init__(self, jobs: Iterator[CopyJob]) -> None:
        self._jobs, self.shared = jobs, threading.Semaphore(0)  # its own: a copy that was interrupted owes nothing
        self.failure: Exception | None = None

    def share(self) -> None:
        try:
            for job in self._jobs:
                job()
        except Exception as error:
            self.failure = error


def in_pieces(span: Span) -> list[CopyJob]:
    to, source, length = span
    starts = range(0, length, PIECE_BYTES)
    return [partial(copy_bytes, to + at, source + at, min(PIECE_BYTES, length - at)) for at in starts]


def copy_one_by_one(spans: Sequence[Span]) -> None:
    for to, source, length in spans:
        copy_small(to, source, length)
