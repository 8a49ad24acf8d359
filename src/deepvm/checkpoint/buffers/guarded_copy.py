"""Copies of memory that may be gone by now: the kernel reports that, where any other read would end the process.

Input: spans of live memory; output: their bytes in memory of our own, or ``MemoryGone``. A thread that shares or
resizes a tensor (``mp.Queue.put(model.state_dict())``) frees the memory that it had. From huge pages, which are what
saves read in place, the kernel's copy takes no longer than memmove; from pages of 4 KiB it takes three times as long.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from itertools import chain

from deepvm.errors import CheckpointError

MOST_SPANS = 1024  # of one call (UIO_MAXIOV)


class MemoryGone(CheckpointError):
    """Memory of a tensor was freed while it was being read."""


def _call() -> ctypes._FuncPointer | None:
    found = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if found is not None:
        found.argtypes = [ctypes.c_int, *[ctypes.c_void_p, ctypes.c_ulong] * 2, ctypes.c_ulong]
        found.restype = ctypes.c_ssize_t
    return found


_read = _call()


class GuardedCopy:
    """Spans that are copied with one call. ``sources`` are (address, length)."""

    def __init__(self, sources: Sequence[tuple[int, int]]) -> None:
        self.bytes, self._count = sum(length for _, length in sources), len(sources)
        self._sources = _vector(sources)

    def into(self, address: int) -> None:
        """Copy all of it to one place."""
        _copy(_vector([(address, self.bytes)]), 1, self._sources, self._count, self.bytes)


class GuardedMove:
    """The same, each span to a place of its own. ``spans`` are (to, from, length)."""

    def __init__(self, spans: Sequence[tuple[int, int, int]]) -> None:
        self._bytes, self._count = sum(length for _, _, length in spans), len(spans)
        self._places = _vector([(to, length) for to, _, length in spans])
        self._sources = _vector([(source, length) for _, source, length in spans])

    def __call__(self) -> None:
        _copy(self._places, self._count, self._sources, self._count, self._bytes)


def _vector(spans: Sequence[tuple[int, int]]) -> ctypes.Array[ctypes.c_size_t]:
    return (ctypes.c_size_t * (2 * len(spans)))(*chain.from_iterable(spans))


def _copy(
    places: ctypes.Array[ctypes.c_size_t],
    place_count: int,
    sources: ctypes.Array[ctypes.c_size_t],
    source_count: int,
    size_bytes: int,
) -> None:
    if _read is None:
        raise OSError(errno.ENOSYS, "process_vm_readv is not known here")
    to, source = ctypes.addressof(places), ctypes.addressof(sources)
    count = _read(os.getpid(), to, place_count, source, source_count, 0)
    if count == size_bytes:
        return
    code = ctypes.get_errno() if count < 0 else errno.EFAULT
    if code == errno.EFAULT:
        raise MemoryGone("the memory of a tensor was freed (it was shared or resized) while a save read it")
    raise OSError(code, f"process_vm_readv: {os.strerror(code)}")


def check_guarded_copies() -> None:
    """Raise OSError if the kernel forbids them."""
    there = ctypes.c_size_t(7)
    here = ctypes.c_size_t(0)
    GuardedCopy([(ctypes.addressof(there), 8)]).into(ctypes.addressof(here))
