"""Allocate fresh memory in the page size that is currently the fastest.

Huge pages take a quarter of the time of small ones if the machine has its memory. If a hypervisor has reclaimed free
memory, it reclaimed huge pages, and these take six times as long as small ones. So both are measured while memory is
allocated, and the faster size is used: docs/decisions/0013 has the figures.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Callable

from deepvm.checkpoint.buffers.write_watch import huge_page_bytes

_HUGE_BYTES = huge_page_bytes()
EXTENT_BYTES = max(4 * 2**20, _HUGE_BYTES)  # allocated at once, in pages of one size
PAGE_BYTES = mmap.PAGESIZE
LOOK_AGAIN = 64  # extents, until the slower size is tried again
_HUGEPAGE, _NOHUGEPAGE, _POPULATE_WRITE = 14, 15, 23  # of madvise; the last one since Linux 5.14
_libc = ctypes.CDLL(None, use_errno=True)


class PageChoice:
    """The page size to use next, from what each extent cost (``record``)."""

    def __init__(self) -> None:
        self._cost_s: dict[bool, float] = {}  # of an extent in huge pages, or in small ones: half of it the last one's
        self._taken = 0

    def huge(self) -> bool:
        for kind in (True, False):
            if kind not in self._cost_s:
                return kind
        faster = self._cost_s[True] <= self._cost_s[False]
        self._taken += 1
        return faster if self._taken % LOOK_AGAIN else not faster

    def record(self, *, huge: bool, seconds: float) -> None:
        self._cost_s[huge] = (self._cost_s.get(huge, seconds) + seconds) / 2


class FreshPages:
    """The extents of some memory, each allocated once. For several threads."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self._first, self._end = address // EXTENT_BYTES, address + size_bytes
        self._address = address
        self._taken = bytearray(-(-self._end // EXTENT_BYTES) - self._first)
        self._lock = threading.Lock()
        self._choice = PageChoice()

    def take(
        self, start: int, end: int, may_continue: Callable[[], bool] = lambda: True, *, unused: bool = False
    ) -> None:
        """Allocate the memory between two addresses, while ``may_continue``. An extent that another thread allocates is
        left to it; a write there allocates it, too. ``unused``: nothing is written there yet, so that zeros may be
        written for a kernel that cannot populate memory."""
        for extent in range(start // EXTENT_BYTES, -(-end // EXTENT_BYTES)):
            if self._taken[extent - self._first]:
                continue
            if not may_continue():
                return
            with self._lock:
                if self._taken[extent - self._first]:
                    continue
                if not any(self._taken):  # parts of memory that has a page stay one mapping, whatever is advised
                    _advise((self._end - 1) // PAGE_BYTES * PAGE_BYTES, self._end, _POPULATE_WRITE)
                self._taken[extent - self._first] = 1
                huge = bool(_HUGE_BYTES) and self._choice.huge()
            self._take(extent * EXTENT_BYTES, huge, unused)

    def _take(self, at: int, huge: bool, unused: bool) -> None:
        start, end = max(at, self._address), min(at + EXTENT_BYTES, self._end)
        began_s = time.thread_time()  # without the time of other threads
        _advise(start, end, _HUGEPAGE if huge else _NOHUGEPAGE)
        if not _advise(start, end, _POPULATE_WRITE) and unused:
            ctypes.memset(start, 0, end - start)
        if not huge:
            _advise(start, end, _HUGEPAGE)  # they may become huge later, between saves
        if end - start == EXTENT_BYTES:
            with self._lock:
                self._choice.record(huge=huge, seconds=time.thread_time() - began_s)


def _advise(start: int, end: int, advice: int) -> bool:
    return bool(_libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice) == 0)
