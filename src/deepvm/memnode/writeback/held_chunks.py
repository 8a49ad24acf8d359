"""The chunks of a checkpoint that is written back: held in memory, or read from the spilled copy or from peers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from deepvm.memnode.storage.checkpoint import Checkpoint, spare_memory
from deepvm.memnode.writeback.peers import Peers


class Superseded(Exception):
    """The checkpoint was deleted or dropped for a newer one before it was written back."""


class HeldChunks:
    """Blocks are held from the start, so that an eviction loses none of them; each is dropped when used."""

    def __init__(self, checkpoint: Checkpoint, peers: Peers | None) -> None:
        self.checkpoint, self._peers = checkpoint, peers
        self._lock = threading.Lock()
        self._abandoned = False
        self._held: dict[int, int] = {}
        for chunk in range(len(checkpoint.manifest.digests)):
            block = checkpoint.hold(chunk)
            if block is not None:
                self._held[chunk] = block

    @contextlib.contextmanager
    def chunk(self, chunk: int) -> Iterator[memoryview]:
        with self._lock:
            if self._abandoned or self.checkpoint.is_deleted():
                raise Superseded
            block = self._held.pop(chunk, None)
        arena, length = self.checkpoint.arena, self.checkpoint.manifest.span(chunk)[1]
        if block is not None:
            with arena.consume(block, length) as view:
                yield view
        elif self.checkpoint.has(chunk):
            with self.checkpoint.chunk(chunk) as view:
                yield view
        elif self._peers is None or self.checkpoint.share.has(chunk):
            raise Superseded
        else:
            with spare_memory(arena, length) as view:
                self._peers.fetch(self.checkpoint.manifest, chunk, view)
                yield view

    def release(self, *, abandon: bool) -> bool:
        """Free the blocks that are not written yet, if the spilled copy has them or the write may be abandoned."""
        with self._lock:
            copied = self.checkpoint.copy is not None
            if not self._held or self.checkpoint.in_memory or not (copied or abandon):
                return False
            self._abandoned = not copied
        self._drop_held()
        return True

    def _drop_held(self) -> None:
        with self._lock:
            held, self._held = self._held, {}
        for block in held.values():
            self.checkpoint.arena.drop(block)

    def __enter__(self) -> HeldChunks:
        return self

    def __exit__(self, *_: object) -> None:
        self._drop_held()
        if self._peers is not None:
            self._peers.close()
