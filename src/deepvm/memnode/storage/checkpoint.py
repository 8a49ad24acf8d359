"""A committed checkpoint: blocks of an upload in, chunks out, from memory or from the spilled copy."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Protocol

from deepvm.errors import NotFound
from deepvm.memnode.storage.arena import Arena, ArenaFull
from deepvm.protocol.placement import Share
from deepvm.store.base import Manifest

_numbers = itertools.count()


class Copy(Protocol):
    """Where chunks can be read once their blocks are evicted."""

    @property
    def whole(self) -> bool:
        """True if it has every chunk of the checkpoint."""
        ...

    def has(self, chunk: int) -> bool: ...
    def read(self, chunk: int, into: memoryview) -> None:
        """Fill ``into`` and verify it; raise StoreError if that fails."""
        ...


class Checkpoint:
    """Its blocks can be evicted at any time: a reader holds those that it needs."""

    def __init__(
        self, arena: Arena, manifest: Manifest, document: bytes, *, share: Share, blocks: dict[int, int] | None
    ) -> None:
        self.arena, self.document, self.share = arena, document, share
        self.manifest = replace(manifest, facts={})  # parsed, they may take many times the document's bytes
        self.copy: Copy | None = None  # in the spill directory
        self.durable = False
        self._deleted = threading.Event()
        self.recovered = False  # from the spill directory, after a restart
        self.saved_by: tuple[str | None, int] = (None, 0)  # session and attempt
        self.order = 0  # of commits in the run, which need not be that of the steps
        self.number = next(_numbers)  # of all in this process, in the order of their commits: clocks are set back
        self._blocks = blocks or {}
        self.in_memory = blocks is not None  # also if its share has no chunks
        self._lock = threading.Lock()

    @property
    def step(self) -> int:
        return self.manifest.step

    def whole_manifest(self) -> Manifest:
        """Return the manifest with its facts, for writeback."""
        return Manifest.from_bytes(self.document)

    @property
    def state(self) -> str:
        return "durable" if self.durable else "spilled" if self.copy is not None else "remote"

    @property
    def whole(self) -> bool:
        """True if every chunk can be read here: this node alone can serve it."""
        copy = self.copy
        return self.share.replicas >= self.share.nodes or (copy is not None and copy.whole)

    def delete(self) -> None:
        """Mark it as deleted: writeback stops."""
        self._deleted.set()

    def is_deleted(self) -> bool:
        return self._deleted.is_set()

    @property
    def blocks(self) -> int:
        return len(self._blocks)

    def has(self, chunk: int) -> bool:
        copy = self.copy
        return chunk in self._blocks or (copy is not None and copy.has(chunk))

    def hold(self, chunk: int) -> int | None:
        """Return the chunk's block with one more reference; None if it is not in memory."""
        with self._lock:
            block = self._blocks.get(chunk)
            if block is not None:
                self.arena.hold(block)
            return block

    def mend(self, chunk: int, block: int) -> bool:
        """Replace a damaged block by a good one; return False if the chunk is not in memory."""
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
        """Yield the chunk's bytes, straight from their block, or read back and verified."""
        length, block = self.manifest.span(chunk)[1], self.hold(chunk)
        if block is not None:
            with self.arena.consume(block, length) as view:
                yield view
            return
        copy = self._copy_of(chunk)
        with spare_memory(self.arena, length) as view:
            copy.read(chunk, view)
            yield view

    def read(self, chunk: int, block: int) -> None:
        """Fill a block of the caller's with a chunk that is on disk only."""
        with self.arena.view(block, self.manifest.span(chunk)[1]) as view:
            self._copy_of(chunk).read(chunk, view)

    def _copy_of(self, chunk: int) -> Copy:
        copy = self.copy
        if copy is None or not copy.has(chunk):
            raise NotFound(f"step {self.step} has no chunk {chunk} here")
        return copy

    def evict(self) -> None:
        """Free the memory; a block that is being read is freed when its reader is done."""
        with self._lock:
            blocks, self._blocks, self.in_memory = self._blocks, {}, False
        for block in blocks.values():
            self.arena.drop(block)


@contextmanager
def spare_memory(arena: Arena, length: int) -> Iterator[memoryview]:
    """Yield a block, if one is free and large enough; else fresh memory."""
    try:
        block = arena.take(reserved=False) if length <= arena.block_bytes else None
    except ArenaFull:
        block = None
    with nullcontext(memoryview(bytearray(length))) if block is None else arena.consume(block, length) as view:
        yield view
