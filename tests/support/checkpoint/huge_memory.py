"""Tensors in huge pages from the start, as malloc's memory is after a while: what saves read in place."""

from __future__ import annotations

import ctypes
import mmap

import pytest
import torch

from deepvm.checkpoint.buffers.write_watch import shared_watch

HUGE = 2**21

_watch = shared_watch()
watched = pytest.mark.skipif(
    _watch is None or _watch.huge_bytes != HUGE, reason="this kernel cannot report writes, or has no huge pages"
)


def in_huge_pages(*shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    memory = mmap.mmap(-1, count * 4 + 2 * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    offset = -address % HUGE
    return torch.frombuffer(memory, dtype=torch.float32, count=count, offset=offset).view(shape).fill_(0)
