"""One rank's shards -> the chunks of its region, straight from the shards' memory, for ``transports`` to send.

A shard that is on another device, or not contiguous, is copied when its first chunk is sent and freed with its last.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import xxhash

from deepvm.checkpoint.buffers.staging import view_of
from deepvm.store.base import chunk_count, chunk_span
from deepvm.store.memory.buffers import from_offset, group
from deepvm.store.memory.connection import Send


@dataclass(frozen=True)
class RegionSegment:
    """Bytes of the file from ``start``; ``load`` returns a contiguous tensor on the CPU that holds them."""

    start: int
    length: int
    load: Callable[[], torch.Tensor]


def filled(start: int, data: bytes | int) -> RegionSegment:
    """Return a segment of these bytes, or of this number of zeros."""
    if isinstance(data, int):
        length = data
        return RegionSegment(start, length, lambda: torch.zeros(length, dtype=torch.uint8, device="cpu"))
    return RegionSegment(start, len(data), lambda: torch.frombuffer(bytearray(data), dtype=torch.uint8))


class Region:
    """``segments`` have no gaps, and begin and end at borders of chunks, or at the end of the file. ``copies`` is the
    number of nodes that get each chunk."""

    def __init__(self, size_bytes: int, chunk_bytes: int, segments: Sequence[RegionSegment], copies: int) -> None:
        self._size_bytes, self._chunk_bytes = size_bytes, chunk_bytes
        self._segments = sorted((s for s in segments if s.length), key=lambda s: s.start)
        self._starts = [s.start for s in self._segments]
        self._tensors: dict[int, torch.Tensor] = {}
        self._views: dict[int, list[memoryview]] = {}
        self._lock = threading.Lock()
        spans = [range(s.start // chunk_bytes, chunk_count(s.start + s.length, chunk_bytes)) for s in self._segments]
        self.chunks = range(spans[0].start, spans[-1].stop) if spans else range(0)
        self._copies = dict.fromkeys(self.chunks, copies)
        self._users = [len(span) for span in spans]  # chunks of each segment that are not sent

    # --- what senders call ----------------------------------------------------------------------------------------

    def digest(self, chunk: int) -> int:
        hasher = xxhash.xxh3_64()
        for view in self.views(chunk):
            hasher.update(view)
        return hasher.intdigest()

    def hand_over(self, chunk: int, offset: int, send: Send) -> int:
        return send(from_offset(group(self.views(chunk)), offset))

    def sent(self, chunk: int) -> None:
        with self._lock:
            self._copies[chunk] -= 1
            if self._copies[chunk]:
                return
            self._views.pop(chunk, None)
            for i in self._segments_in(chunk):
                self._users[i] -= 1
                if not self._users[i]:
                    self._tensors.pop(i, None)

    def readable(self, chunk: int) -> bool:
        return self._copies[chunk] > 0

    # --- parts ------------------------------------------------------------------------------------------------------

    def views(self, chunk: int) -> list[memoryview]:
        with self._lock:
            found = self._views.get(chunk)
            if found is None:
                found = self._views[chunk] = self._make_views(chunk)
            return found

    def _make_views(self, chunk: int) -> list[memoryview]:
        offset, length = chunk_span(chunk, self._size_bytes, self._chunk_bytes)
        views = []
        for i in self._segments_in(chunk):
            segment = self._segments[i]
            if i not in self._tensors:
                self._tensors[i] = segment.load()
            begin, end = max(offset, segment.start), min(offset + length, segment.start + segment.length)
            views.append(view_of(self._tensors[i].data_ptr() + begin - segment.start, end - begin))
        return views

    def _segments_in(self, chunk: int) -> range:
        offset, length = chunk_span(chunk, self._size_bytes, self._chunk_bytes)
        return range(bisect_right(self._starts, offset) - 1, bisect_right(self._starts, offset + length - 1))
