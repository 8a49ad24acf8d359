"""A committed checkpoint: whole, visible, and in memory, in the spill directory, or both."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import xxhash

from deepvm.errors import Corrupt, NotFound
from deepvm.memnode.arena import Arena, NoRoom
from deepvm.memnode.uploads import Share
from deepvm.store.base import Manifest


class ChunkFile(Protocol):
    """Where chunks can be read again once their blocks are gone."""

    def read(self, offset: int, into: memoryview) -> None: ...


class Checkpoint:
    def __init__(
        self, arena: Arena, manifest: Manifest, document: bytes, *, share: Share, blocks: dict[int, int]
    ) -> None:
        self.arena, self.manifest, self.document, self.share = arena, manifest, document, share
        self.file: ChunkFile | None = None
        self.durable = False
        self.deleted = False
        self._blocks = blocks
        self._lock = threading.Lock()

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def state(self) -> str:
        return "durable" if self.durable else "spilled" if self.file is not None else "remote"

    @property
    def in_memory(self) -> bool:
        return bool(self._blocks)

    @property
    def blocks(self) -> int:
        return len(self._blocks)

    def has(self, chunk: int) -> bool:
        return chunk in self._blocks or (self.file is not None and self.share.has(chunk))

    def hold(self, chunk: int) -> int | None:
        """The chunk's block with one more reference, or None where it is not in memory."""
        with self._lock:
            block = self._blocks.get(chunk)
            if block is not None:
                self.arena.hold(block)
            return block

    @contextmanager
    def chunk(self, chunk: int) -> Iterator[memoryview]:
        """The chunk's bytes, straight from their block, or read back and verified."""
        offset, length = self.manifest.span(chunk)
        block = self.hold(chunk)
        if block is None:
            with self._read_back(chunk, offset, length) as view:
                yield view
            return
        try:
            with self.arena.view(block, length) as view:
                yield view
        finally:
            self.arena.drop(block)

    @contextmanager
    def _read_back(self, chunk: int, offset: int, length: int) -> Iterator[memoryview]:
        file = self.file
        if file is None or not self.share.has(chunk):
            raise NotFound(f"step {self.step} has no chunk {chunk} here")
        try:
            block = self.arena.take(reserved=False)
        except NoRoom:
            block = None
        view = memoryview(bytearray(length)) if block is None else self.arena.view(block, length)
        try:
            file.read(offset, view)
            if xxhash.xxh3_64_intdigest(view) != self.manifest.digests[chunk]:
                raise Corrupt(f"step {self.step}: chunk {chunk} is damaged in the spill directory")
            yield view
        finally:
            view.release()
            if block is not None:
                self.arena.drop(block)

    def evict(self) -> None:
        """Give the memory back; blocks that are being read go when the reader is done."""
        with self._lock:
            blocks, self._blocks = self._blocks, {}
        for block in blocks.values():
            self.arena.drop(block)
