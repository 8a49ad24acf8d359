"""The huge pages of tensors that only an optimizer changes: a save protects them and reads them where they are.

Input: the tensors of a plan. Output: the address ranges that a save may read in place. Only huge pages are protected:
to protect and unprotect memory in pages of 4 KiB takes longer than to copy it (docs/decisions/0015 has the figures).
Memory of others within a huge page does not matter: the kernel splits the page at the first write to it.
"""

from __future__ import annotations

import bisect
import mmap
import threading
import time
import weakref
from collections.abc import Iterable, Sequence

import torch

from deepvm.checkpoint.buffers.priority import start_background
from deepvm.checkpoint.buffers.write_watch import Range, WriteWatch, collapse, joined, plain_memory

PAGE_BYTES = mmap.PAGESIZE
LEAST_BYTES = 64 * 1024  # smaller tensors have few whole pages, and are copied
LEAST_COVER = 0.5  # of a huge page's bytes; the rest belongs to others, who may write it and split the page
MOST_RUNS = 4096  # each takes two of the 65,530 mappings that a process may have
COLLAPSE_AGAIN_S = 60.0  # if many are split: a forked process splits all that are written
FEW_PAGES = 32  # 15 ms of a sender's time
MOST_FAILURES = 8  # after which a page is left as it is


def whole_pages(address: int, length: int) -> Range:
    """Return the whole pages within some memory; or an empty range."""
    start = -(-address // PAGE_BYTES) * PAGE_BYTES
    return start, max(start, (address + length) // PAGE_BYTES * PAGE_BYTES)


def within(ranges: Sequence[Range], start: int, end: int) -> list[Range]:
    """Return the parts of [start, end) that lie in sorted ranges."""
    found = []
    at = max(0, bisect.bisect_right(ranges, (start, 2**64)) - 1)
    for first, last in ranges[at:]:
        if first >= end:
            break
        if last > start:
            found.append((max(first, start), min(last, end)))
    return found


def watchable(tensor: torch.Tensor) -> bool:
    """True if all writes to it go through this process's page tables: not those of a GPU into pinned memory."""
    return tensor.nbytes >= LEAST_BYTES and not (torch.cuda.is_initialized() and tensor.is_pinned())  # type: ignore[no-untyped-call]


class LivePages:
    """Protected from ``protect`` to ``unprotect``. For one save at a time."""

    def __init__(self, watch: WriteWatch, tensors: Iterable[torch.Tensor]) -> None:
        self._watch, self._owner = watch, object()
        pages = _well_covered(tensors, watch.huge_bytes) if watch.huge_bytes else set()
        self.pages = watch.claim(self._owner, pages)
        runs = joined((page * watch.huge_bytes, (page + 1) * watch.huge_bytes) for page in sorted(self.pages))
        self._runs = [run for run in runs[:MOST_RUNS] if watch.register(*run)]
        self._bytes = sum(end - start for start, end in self._runs)
        self._protected: tuple[Range, ...] = ()
        self._collapsing: threading.Thread | None = None
        self._collapse_after_s = 0.0
        self._whole = True  # at the last save, all was in huge pages
        self._failures: dict[int, int] = {}  # by page: how often it could not be made huge
        self._ended = threading.Event()
        self.close = weakref.finalize(self, _release, watch, self._owner, self._runs, self._ended)
        self.close.atexit = False

    def protect(self) -> tuple[Range, ...]:
        """Protect what is in huge pages now; the rest waits for ``mend``."""
        if not self.close.alive:
            return ()  # the pages may be another's by now
        huge = [part for run in self._runs for part in self._watch.huge(*run)]
        self._protected = tuple(part for part in huge if self._watch.protect(*part))
        self._whole = sum(end - start for start, end in huge) == self._bytes
        return self._protected

    def unprotect(self) -> None:
        protected, self._protected = self._protected, ()
        for part in protected:
            self._watch.unprotect(*part)

    def untouched(self, ranges: Iterable[Range]) -> bool:
        return self._watch.untouched(ranges)

    def mend(self) -> None:
        """Move into huge pages what is not: at first all of it, in a thread of low priority, later the few pages that
        were split by writes of their neighbours. Between saves: a protected page stays as it is."""
        if self._whole or (self._collapsing is not None and self._collapsing.is_alive()):
            return
        huge = [part for run in self._runs for part in self._watch.huge(*run)]
        size = self._watch.huge_bytes
        split = [
            page
            for start, end in self._runs
            for page in range(start, end, size)
            if self._failures.get(page, 0) < MOST_FAILURES and not within(huge, page, page + size)
        ]
        work = (split, size, self._failures, self._ended)
        if len(split) <= FEW_PAGES:
            _collapse(*work)
        elif time.monotonic() >= self._collapse_after_s:
            self._collapse_after_s = time.monotonic() + COLLAPSE_AGAIN_S
            self._collapsing = start_background("deepvm-collapse", _collapse, *work)


def _collapse(pages: Sequence[int], huge_bytes: int, failures: dict[int, int], ended: threading.Event) -> None:
    """Page by page: each keeps other threads from mapping memory while it is copied, for half a millisecond. One that
    fails (it is protected, or memory is short) stays as it is."""
    for page in pages:
        if ended.is_set():
            return
        if not collapse(page, huge_bytes):
            failures[page] = failures.get(page, 0) + 1


def _release(watch: WriteWatch, owner: object, runs: Sequence[Range], ended: threading.Event) -> None:
    ended.set()
    for run in runs:
        watch.unregister(*run)
    watch.disclaim(owner)


def _well_covered(tensors: Iterable[torch.Tensor], huge_bytes: int) -> set[int]:
    """Return the numbers of huge pages that consist mostly of whole pages of these tensors."""
    covered: dict[int, int] = {}
    behind = 0  # tensors may overlap: tied ones do
    for address, length in sorted((t.data_ptr(), t.nbytes) for t in tensors if watchable(t)):
        start, end = whole_pages(address, length)
        start, behind = max(start, behind), max(end, behind)
        while start < end:
            page = start // huge_bytes
            until = min(end, (page + 1) * huge_bytes)
            covered[page] = covered.get(page, 0) + until - start
            start = until
    memory = plain_memory()
    full = (page for page, size in covered.items() if size >= LEAST_COVER * huge_bytes)
    spans = {page: (page * huge_bytes, (page + 1) * huge_bytes) for page in full}
    return {page for page, span in spans.items() if within(memory, *span) == [span]}
