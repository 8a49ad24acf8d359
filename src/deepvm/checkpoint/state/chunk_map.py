"""A layout cut into chunks: which parts of which tensors each chunk has."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from deepvm.checkpoint.state.layout import Layout
from deepvm.store.base import chunk_count, chunk_span

HEADER = -1  # in the place of an entry: bytes of the header


@dataclass(frozen=True)
class ChunkMap:
    """For each chunk the parts of tensors in it, as (entry, file offset, length)."""

    layout: Layout
    chunk_bytes: int

    @property
    def count(self) -> int:
        return chunk_count(self.layout.size_bytes, self.chunk_bytes)

    def span(self, chunk: int) -> tuple[int, int]:
        return chunk_span(chunk, self.layout.size_bytes, self.chunk_bytes)

    @cached_property
    def header_chunks(self) -> int:
        """The number of chunks, from the first on, that have bytes of the header."""
        return chunk_count(self.layout.header_bytes, self.chunk_bytes)

    def chunks_of(self, entries: Iterable[int]) -> list[int]:
        """Return the chunks that hold some tensors, in the order of the tensors."""
        found: dict[int, None] = {}
        for entry in entries:
            found.update(dict.fromkeys(self.chunks_of_one(entry)))
        return list(found)

    def chunks_of_one(self, entry: int) -> range:
        where = self.layout.entries[entry]
        first = where.start // self.chunk_bytes
        return range(first, chunk_count(where.start + where.bytes, self.chunk_bytes) if where.bytes else first)

    @cached_property
    def parts(self) -> list[list[tuple[int, int, int]]]:
        found = []
        for chunk in range(self.count):
            start, length = self.span(chunk)
            of_header = min(self.layout.header_bytes, start + length) - start
            parts = [(HEADER, start, of_header)] if of_header > 0 else []
            for i in self.layout.overlapping(start, start + length):
                entry = self.layout.entries[i]
                begin, end = max(start, entry.start), min(start + length, entry.start + entry.bytes)
                if end > begin:
                    parts.append((i, begin, end - begin))
            found.append(parts)
        return found
