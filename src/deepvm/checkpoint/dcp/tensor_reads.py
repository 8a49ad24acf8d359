"""A load plan's reads -> filled tensors. Each chunk that holds wanted bytes is read once, verified, for ``reader``.

Bytes go straight into a tensor's memory, or first into a buffer for tensors on other devices, of other types, or cut
along an inner dimension.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from math import prod

import torch
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from deepvm.checkpoint.dcp.metadata import Shard
from deepvm.checkpoint.restore.chunk_reader import Part, StoreSource
from deepvm.errors import CheckpointError
from deepvm.store.base import Manifest, Store, chunk_count
from deepvm.store.chunk_reads import for_each_chunk


class Read:
    """A part of a shard that goes into a tensor. ``start`` and ``end`` are where its rows lie in the file."""

    def __init__(self, item: ReadItem, shard: Shard, tensor: torch.Tensor) -> None:
        self.item, self.tensor = item, tensor
        self._shard, self._lengths = shard, tuple(item.lengths)
        if tuple(tensor.shape) != self._lengths:
            raise CheckpointError(f"{item.dest_index.fqn} has {tuple(tensor.shape)}, the plan {self._lengths}")
        inner, sizes = self._lengths[1:], shard.sizes
        row_bytes = prod(sizes[1:]) * shard.dtype.itemsize
        first, rows = (item.storage_offsets[0], self._lengths[0]) if sizes else (0, 1)
        self.start = shard.entry.offset + first * row_bytes
        self.end = self.start + rows * row_bytes
        plain = tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        self._in_place = inner == sizes[1:] and plain and tensor.dtype == shard.dtype
        self._buffer: torch.Tensor | None = None
        self.chunks_missing = 0

    def chunks(self, chunk_bytes: int) -> range:
        if self.start == self.end or not self.tensor.numel():
            return range(0)
        return range(self.start // chunk_bytes, chunk_count(self.end, chunk_bytes))

    def part(self, offset: int, length: int) -> Part:
        """Return which bytes of a chunk go into this read, and where."""
        begin, end = max(offset, self.start), min(offset + length, self.end)
        target = self.tensor
        if not self._in_place:
            if self._buffer is None:
                self._buffer = torch.empty(self.end - self.start, dtype=torch.uint8, device="cpu")
            target = self._buffer
        return begin, end - begin, target.data_ptr() + begin - self.start

    def finish(self) -> None:
        """Copy the buffer, if there is one, into the tensor once all chunks have arrived."""
        if self._buffer is None:
            return
        rows = self._buffer.view(self._shard.dtype)
        if self._lengths:
            rows = rows.view(self._lengths[0], *self._shard.sizes[1:])
            for dim in range(1, len(self._lengths)):
                rows = rows.narrow(dim, self.item.storage_offsets[dim], self._lengths[dim])
        self.tensor.copy_(rows.view(self._lengths) if not self._lengths else rows)
        self._buffer = None


def read_all(store: Store, manifest: Manifest, reads: Sequence[Read], planner: LoadPlanner) -> int:
    """Fill all tensors; returns the number of bytes read from the store."""
    by_chunk: dict[int, list[Read]] = defaultdict(list)
    for read in reads:
        chunks = read.chunks(manifest.chunk_bytes)
        read.chunks_missing = len(chunks)
        for chunk in chunks:
            by_chunk[chunk].append(read)
        if not chunks:
            planner.commit_tensor(read.item, read.tensor)
    lock, source = threading.Lock(), StoreSource(store)

    def fetch(chunk: int, _: memoryview) -> None:
        with lock:  # a read may have to make its buffer
            parts = [read.part(*manifest.span(chunk)) for read in by_chunk[chunk]]
        source.read(manifest, chunk, parts)
        with lock:
            for read in by_chunk[chunk]:
                read.chunks_missing -= 1
                if not read.chunks_missing:
                    read.finish()
                    planner.commit_tensor(read.item, read.tensor)

    for_each_chunk(manifest, fetch, threads=source.readers, chunks=sorted(by_chunk))
    return sum(manifest.span(chunk)[1] for chunk in by_chunk)
