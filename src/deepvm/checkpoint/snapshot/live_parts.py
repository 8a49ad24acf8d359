"""Which bytes of a snapshot are read where they are, and which from staging memory.

Input: the owned tensors of a plan and the address ranges that are protected. Output, for each chunk: the parts that
are read in place, and the memory to send. All else is in staging memory when a save returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from deepvm.checkpoint.buffers.copying import CopyJob, guarded_jobs
from deepvm.checkpoint.buffers.guarded_copy import MOST_SPANS, GuardedCopy
from deepvm.checkpoint.buffers.staging import Staging
from deepvm.checkpoint.buffers.write_watch import Range, joined
from deepvm.checkpoint.snapshot.live_pages import PAGE_BYTES, whole_pages, within
from deepvm.checkpoint.state.chunk_map import ChunkMap
from deepvm.protocol.sockets import HASHED_BYTES
from deepvm.store.memory.buffers import BufferGroup, group


class Part(NamedTuple):
    """Bytes from ``offset`` on in the file, and where they are in memory."""

    offset: int
    address: int
    length: int


class LiveParts:
    """For one set of protected ranges; made again only when that set changes."""

    def __init__(self, chunk_map: ChunkMap, staging: Staging, tensors: Sequence[Part], ranges: Sequence[Range]) -> None:
        """``tensors``: the large ones, whole."""
        self.chunk_map, self._staging, self.ranges = chunk_map, staging, ranges
        self.parts: list[list[Part]] = [[] for _ in range(chunk_map.count)]  # by chunk
        rest: list[Part] = []
        for tensor in tensors:
            self._place(tensor, rest)
        self.in_chunk = bytearray(bool(parts) for parts in self.parts)
        self.bytes = sum(part.length for parts in self.parts for part in parts)
        self.rest = [(staging.address + part.offset, part.address, part.length) for part in rest]
        self.copy_all = self._copies([part for parts in self.parts for part in parts])
        self._groups: dict[int, list[BufferGroup]] = {}
        self._live: dict[int, list[GuardedCopy]] = {}

    def _place(self, tensor: Part, rest: list[Part]) -> None:
        """Divide a tensor into what is read in place, chunk by chunk, and the rest."""
        at = tensor.address
        for start, end in within(self.ranges, *whole_pages(tensor.address, tensor.length)):
            if start > at:
                rest.append(_within(tensor, at, start))
            self._cut(_within(tensor, start, end))
            at = end
        if at < tensor.address + tensor.length:
            rest.append(_within(tensor, at, tensor.address + tensor.length))

    def _cut(self, part: Part) -> None:
        offset, end = part.offset, part.offset + part.length
        while offset < end:
            chunk = offset // self.chunk_map.chunk_bytes
            until = min(end, (chunk + 1) * self.chunk_map.chunk_bytes)
            self.parts[chunk].append(Part(offset, part.address + offset - part.offset, until - offset))
            offset = until

    def _copies(self, parts: Sequence[Part]) -> list[CopyJob]:
        return guarded_jobs([(self._staging.address + part.offset, part.address, part.length) for part in parts])

    def copy_chunks(self, chunks: Sequence[int]) -> tuple[list[CopyJob], int]:
        """Return the copies of what some chunks have in place, and their bytes."""
        parts = [part for chunk in chunks for part in self.parts[chunk]]
        return self._copies(parts), sum(part.length for part in parts)

    def pages_of(self, chunk: int) -> list[Range]:
        """Return the pages that a chunk is read from in place. They belong to its tensors alone."""
        return joined(
            (address // PAGE_BYTES * PAGE_BYTES, -(-(address + length) // PAGE_BYTES) * PAGE_BYTES)
            for _, address, length in self.parts[chunk]
        )

    def staged(self, chunk: int) -> list[BufferGroup]:
        """Return the memory of a chunk that is in staging memory as a whole. Made once, as what ``live`` returns, since
        that takes longer than to send small tensors. The caller holds the chunk's lock."""
        found = self._groups.get(chunk)
        if found is None:
            offset, length = self.chunk_map.span(chunk)
            found = self._groups[chunk] = group([self._staging.view[offset : offset + length]])
        return found

    def live(self, chunk: int) -> list[GuardedCopy]:
        """Return the copies of a chunk that has something in place, each of at most HASHED_BYTES."""
        found = self._live.get(chunk)
        if found is None:
            found = self._live[chunk] = _grouped(self._spans(chunk))
        return found

    def _spans(self, chunk: int) -> list[tuple[int, int]]:
        """Return address and length of all memory of a chunk, in the file's order."""
        at, length = self.chunk_map.span(chunk)
        end, base = at + length, self._staging.address
        spans: list[tuple[int, int]] = []
        for part in self.parts[chunk]:
            if part.offset > at:
                spans.append((base + at, part.offset - at))
            spans.append((part.address, part.length))
            at = part.offset + part.length
        if at < end:
            spans.append((base + at, end - at))
        return spans


def _grouped(spans: Sequence[tuple[int, int]]) -> list[GuardedCopy]:
    found: list[GuardedCopy] = []
    one: list[tuple[int, int]] = []
    left = HASHED_BYTES
    for address, length in spans:
        start = 0
        while start < length:
            part = min(left, length - start)
            one.append((address + start, part))
            start, left = start + part, left - part
            if not left or len(one) == MOST_SPANS:
                found.append(GuardedCopy(one))
                one, left = [], HASHED_BYTES
    return [*found, GuardedCopy(one)] if one else found


def _within(tensor: Part, start: int, end: int) -> Part:
    return Part(tensor.offset + start - tensor.address, start, end - start)
