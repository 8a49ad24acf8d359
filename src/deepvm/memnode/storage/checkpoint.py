"""A committed checkpoint: whole, visible, and in memory, in the spill directory, or both."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

from deepvm.errors import NotFound
from deepvm.memnode.storage.arena import Arena, ArenaFull
from deepvm.protocol.placement import Share
from deepvm.store.base import Manifest


class Copy(Protocol):
    """Where chunks can be read again once their blocks are gone."""

    def has(self, chunk: int) -> bool: ...
    def read(self, chunk: int, into: memoryview) -> None:
        """Fill ``into`` and verify it; a StoreError where that fails."""
        ...


class Checkpoint:
    """Blocks can go at any time after ``hold``; whoever needs them longer holds them."""

    def __init__(
        self, arena: Arena, manifest: Manifest, document: bytes, *, share: Share, blocks: dict[int, int] | None
    ) -> None:
        self.arena, self.document, self.share = arena, document, share
        self.manifest = replace(manifest, facts={})  # parsed, they may take many times the document's bytes
        self.copy: Copy | None = None  # in the spill directory
        self.durable = False
        self._deleted = threading.Event()
        self.recovered = False  # from the spill directory, after a restart
        self.order = 0  # of commits in the run, which need not be that of the steps
        self._blocks = blocks or {}
        self._inside = blocks is not None  # a share may be of no chunks at all
        self._lock = threading.Lock()

    @property
    def step(self) -> int:
        return self.manifest.step

    def whole_manifest(self) -> Manifest:
        """With its facts, for whoever writes it on."""
        return Manifest.from_bytes(self.document)

    @property
    def state(self) -> str:
        return "durable" if self.durable else "spilled" if self.copy is not None else "remote"

    def delete(self) -> None:
        """Nobody shall find it any more; whoever writes it on stops."""
        self._deleted.set()

    def is_deleted(self) -> bool:
        return self._deleted.is_set()

    @property
    def in_memory(self) -> bool:
        return self._inside

    @property
    def blocks(self) -> int:
        return len(self._blocks)

    def has(self, chunk: int) -> bool:
        copy = self.copy
        return chunk in self._blocks or (copy is not None and copy.has(chunk))

    def hold(self, chunk: int) -> int | None:
        """The chunk's block with one more reference, or None where it is not in memory."""
        with self._lock:
            block = self._blocks.get(chunk)
            if block is not None:
                self.arena.hold(block)
            return block

    def mend(self, chunk: int, block: int) -> bool:
        """Put a good block in the place of a damaged one; False where the chunk is not in memory."""
        with self._lock:
            before = self._blocks.get(chunk)
            if before is not None:
                self._blocks[chunk] = block
        if before is None:
            return False
        self.arena.index([(block, (self.manifest.digests[chunk], self.manifest.span(chunk)[1]))])
        self.arena.drop(before)
        return True

    @contextmanager
    def chunk(self, chunk: int) -> Iterator[memoryview]:
        """The chunk's bytes, straight from their block, or read back and verified."""
        _, length = self.manifest.span(chunk)
        block = self.hold(chunk)
        if block is None:
            with self._read_back(chunk, length) as view:
                yield view
            return
        try:
            with self.arena.view(block, length) as view:
                yield view
        finally:
            self.arena.drop(block)

    def read(self, chunk: int, block: int) -> None:
        """Fill a block of the caller's with a chunk that is on disk only."""
        copy = self.copy
        if copy is None or not copy.has(chunk):
            raise NotFound(f"step {self.step} has no chunk {chunk} here")
        with self.arena.view(block, self.manifest.span(chunk)[1]) as view:
            copy.read(chunk, view)

    @contextmanager
    def _read_back(self, chunk: int, length: int) -> Iterator[memoryview]:
        copy = self.copy
        if copy is None or not copy.has(chunk):
            raise NotFound(f"step {self.step} has no chunk {chunk} here")
        with spare_memory(self.arena, length) as view:
            copy.read(chunk, view)
            yield view

    def evict(self) -> None:
        """Give the memory back; blocks that are being read go when the reader is done."""
        with self._lock:
            blocks, self._blocks, self._inside = self._blocks, {}, False
        for block in blocks.values():
            self.arena.drop(block)


@contextmanager
def spare_memory(arena: Arena, length: int) -> Iterator[memoryview]:
    """A block for a moment, where one is free and large enough; fresh memory otherwise."""
    try:
        block = arena.take(reserved=False) if length <= arena.block_bytes else None
    except ArenaFull:
        block = None
    if block is None:
        yield memoryview(bytearray(length))
        return
    try:
        with arena.view(block, length) as view:
            yield view
    finally:
        arena.drop(block)
