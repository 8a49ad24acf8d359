"""Memory that is allocated and touched once, and views of memory that others own.

First touch is the hidden cost of a copy: fresh pages take ten times as long as warm ones.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress

import torch

from deepvm.checkpoint.buffers.fresh_pages import FreshPages

copy_bytes = ctypes.memmove  # releases the interpreter's lock
copy_small = ctypes.PyDLL(None).memmove  # does not
copy_small.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t]
copy_small.restype = None


def view_of(address: int, length: int) -> memoryview:
    """Return the memory at an address. Its owner has to stay alive."""
    return memoryview((ctypes.c_char * length).from_address(address)).cast("B")


class Staging:
    """Memory as large as a checkpoint, touched at once if it is ``warm``. ``over`` is memory that exists already. A
    forked process (a loader's worker) does not get it, unless ``inherited``: else the next write to each page would
    copy it once more for the worker."""

    def __init__(
        self, size_bytes: int, *, warm: bool = True, over: memoryview | None = None, inherited: bool = False
    ) -> None:
        self.size_bytes = size_bytes
        self.mapped_bytes = _pages_up(max(1, size_bytes))
        self._map: mmap.mmap | memoryview = _private(self.mapped_bytes, inherited) if over is None else over
        self.own = over is None  # and not a file's, or a segment's
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._fresh = FreshPages(self.address, self.mapped_bytes) if self.own else None
        if warm:
            self.warm(size_bytes)

    def warm(self, until: int, may_continue: Callable[[], bool] = lambda: True) -> None:
        """Allocate the pages of the first ``until`` bytes, while ``may_continue``. Only before anything is written to
        them."""
        if self._fresh is not None:
            self._fresh.take(self.address, self.address + until, may_continue, unused=True)

    def touch(self, start: int, end: int) -> None:
        """Allocate the pages between two offsets, which others may be writing to."""
        if self._fresh is not None:
            self._fresh.take(self.address + start, self.address + end)

    def shrink(self, size_bytes: int) -> None:
        """Use only the first ``size_bytes``: what was reserved behind them and never touched takes no memory."""
        self.size_bytes, self.mapped_bytes = size_bytes, _pages_up(max(1, size_bytes))

    def tensor(self, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor over a part of this memory."""
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        found = torch.frombuffer(self._map, dtype=dtype, count=count, offset=start)
        return found if len(shape) == 1 else found.view(shape)

    def lasting_tensor(self, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor that may be kept: its pages are freed with it, even if its neighbours stay."""
        if not self.own or 0 in shape:
            return self.tensor(start, dtype, shape)
        length = dtype.itemsize * math.prod(shape)
        part = (ctypes.c_char * length).from_address(self.address + start)
        weakref.finalize(part, self._release_within, start, start + length).atexit = False
        return torch.frombuffer(part, dtype=dtype).view(shape)

    def holds(self, address: int) -> bool:
        return self.address <= address < self.address + self.mapped_bytes

    def release_all_but(self, kept: Iterable[tuple[int, int]]) -> None:
        """Free the pages that hold nothing of these (address, length)."""
        at = 0
        for address, length in [*sorted(kept), (self.address + self.mapped_bytes, 0)]:
            start = address - self.address
            self._release_within(at, start)
            at = max(at, start + length)

    def _release_within(self, start: int, end: int) -> None:
        """Free the whole pages between two offsets."""
        first, last = _pages_up(start), end // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            self._release(first, last - first)

    def _release(self, start: int, length: int) -> None:
        if isinstance(self._map, mmap.mmap):
            with suppress(OSError, AttributeError, ValueError):
                self._map.madvise(mmap.MADV_DONTNEED, start, length)


def _private(size_bytes: int, inherited: bool) -> mmap.mmap:
    """Map memory of this process alone: its first touch takes two thirds of the time of shared memory."""
    found = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if not inherited:
        with suppress(OSError, AttributeError):
            found.madvise(mmap.MADV_DONTFORK)
    return found


def _pages_up(size_bytes: int) -> int:
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class _OfThread(threading.local):
    buffer: Staging | None = None


_of_thread = _OfThread()


def thread_buffer(size_bytes: int) -> Staging:
    """Return memory of the calling thread's own, of at least this size: the same at every call."""
    buffer = _of_thread.buffer
    if buffer is None or buffer.size_bytes < size_bytes:
        buffer = _of_thread.buffer = Staging(size_bytes)
    return buffer
