"""Copies with several threads: large memory in pieces, small tensors one after the other.

Input: spans of memory; snapshot/ decides which. To release the interpreter's lock for each small tensor, or to call
torch for it, would take longer than its copy.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

import torch

from deepvm.checkpoint.buffers.guarded_copy import MOST_SPANS, GuardedMove
from deepvm.checkpoint.buffers.staging import copy_bytes, copy_small
from deepvm.errors import CheckpointError

SMALL_BYTES, SMALL_COUNT = 64 * 1024, 32 * 1024  # more numbers than that torch would copy with threads of its own
BATCH = 1000  # small tensors that one thread copies before another gets its turn
PIECE_BYTES = 4 * 2**20
ALONE_BYTES = 4 * 2**20  # less is copied before another thread would begin
ONE_CALL_BYTES = 16 * 2**20  # more is shared by several threads, which begin when they get a core
COPY_THREADS = min(4, os.cpu_count() or 1)
COPY_S = 600.0  # no copy takes longer

Span: TypeAlias = tuple[int, int, int]  # to, from, length
CopyJob: TypeAlias = Callable[[], object]


def is_small(tensor: torch.Tensor) -> bool:
    """True if a call for its copy alone would take longer than the copy, so that it is copied with others."""
    plain = type(tensor) is torch.Tensor and not tensor.is_complex()
    return plain and tensor.nbytes < SMALL_BYTES and tensor.numel() < SMALL_COUNT


class Copier:
    """Copy with several threads, including the calling one; the others start with the first copy."""

    def __init__(self, threads: int = COPY_THREADS) -> None:
        self._threads = threads
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._helpers: list[threading.Thread] = []

    def do(self, jobs: Sequence[CopyJob], *, alone: bool = False) -> None:
        """Run all jobs; raise the error of one that failed. ``alone``: with the calling thread only."""
        if alone:
            for job in jobs:
                job()
            return
        self.finish(self.start(jobs))

    def start(self, jobs: Sequence[CopyJob]) -> Work:
        """Start the jobs in the other threads."""
        while len(self._helpers) < self._threads - 1:
            self._helpers.append(threading.Thread(target=self._help, name="deepvm-copy", daemon=True))
            self._helpers[-1].start()
        work = Work(iter(jobs))
        for _ in self._helpers:
            self._work.put(work)
        return work

    def finish(self, work: Work) -> None:
        """Run jobs in this thread, too, until all are done."""
        work.share()
        for _ in self._helpers:
            if not work.shared.acquire(timeout=COPY_S):
                raise CheckpointError(f"a copy of the state did not end within {COPY_S:g} s: the save is aborted")
        if work.failure is not None:
            raise work.failure

    def close(self) -> None:
        for _ in self._helpers:
            self._work.put(None)

    def _help(self) -> None:
        while (work := self._work.get()) is not None:
            work.share()
            work.shared.release()
            del work  # or it stays on the trainer's heap until the next one


class Work:
    """Jobs that several threads share: taking one from the iterator is one step under the GIL."""

    def __init__(self, jobs: Iterator[CopyJob]) -> None:
        self._jobs, self.shared = (
            jobs,
            threading.Semaphore(0),
        )  # not the Copier's: an interrupted copy may release it late
        self.failure: Exception | None = None

    def share(self) -> None:
        try:
            for job in self._jobs:
                job()
        except Exception as error:
            self.failure = error


def copy_jobs(spans: Sequence[Span]) -> list[CopyJob]:
    """Divide copies into jobs: large ones in pieces, small ones in batches."""
    large = [
        partial(copy_bytes, to + at, source + at, min(PIECE_BYTES, length - at))
        for to, source, length in spans
        if length >= SMALL_BYTES
        for at in range(0, length, PIECE_BYTES)
    ]
    small = [span for span in spans if span[2] < SMALL_BYTES]
    return [*large, *(partial(_copy_each, small[at : at + BATCH]) for at in range(0, len(small), BATCH))]


def guarded_jobs(spans: Sequence[Span]) -> list[CopyJob]:
    """Divide copies of memory that may be gone into jobs of about one piece each."""
    jobs: list[CopyJob] = []
    waiting: list[Span] = []
    left = PIECE_BYTES
    for to, source, length in spans:
        at = 0
        while at < length:
            part = min(left, length - at)
            waiting.append((to + at, source + at, part))
            at, left = at + part, left - part
            if not left or len(waiting) == MOST_SPANS:
                jobs.append(GuardedMove(waiting))
                waiting, left = [], PIECE_BYTES
    return [*jobs, GuardedMove(waiting)] if waiting else jobs


def _copy_each(spans: Sequence[Span]) -> None:
    for to, source, length in spans:
        copy_small(to, source, length)
