"""A snapshot's way into a store that is no memory node: a file system, or object storage. Rank 0 writes all of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deepvm.checkpoint import ranks
from deepvm.checkpoint.save.memory_transfer import Texts, TransferResult
from deepvm.checkpoint.snapshot.snapshot import Snapshot
from deepvm.checkpoint.state.capture import join
from deepvm.checkpoint.state.chunk_map import ChunkMap
from deepvm.errors import StoreUnavailable
from deepvm.store.base import DEFAULT_CHUNK_BYTES, Manifest, Store, Writer
from deepvm.store.memory.buffers import BufferGroup, views_of

COMMIT_POLL_S = 0.05


class PlainTransfer:
    def __init__(self, store: Store, run: str, rank: int, world_size: int = 1) -> None:
        self._store, self._run, self._rank, self._world_size = store, run, rank, world_size

    def block_bytes(self) -> int:
        return DEFAULT_CHUNK_BYTES

    def copies(self, pieces: ChunkMap) -> list[int]:
        return [1 if self._rank == 0 else 0] * pieces.count

    def plain_values(self, step: int, texts: Texts, *, otherwise: Callable[[], None]) -> Texts | str:
        """All ranks' plain values, joined: there is no node where they could meet. ``otherwise`` is called if ranks
        do not come together, and the save is given up."""
        if self._world_size == 1:
            return texts
        try:
            return ", ".join(ranks.gather_texts(f"save({step})", join(texts)))
        except BaseException:
            otherwise()
            raise

    def save(
        self,
        snapshot: Snapshot,
        step: int,
        *,
        extra: str,
        write_header: Callable[[Sequence[str]], None],
        facts: Mapping[str, Any],
        deadline_s: float,
        on_sent: Callable[[], None],
        attempt: int = 0,  # noqa: ARG002 - a writer of its own for each
    ) -> TransferResult:
        pieces = snapshot.pieces
        if self._rank != 0:  # the state is the same on every rank, and one writer is enough
            on_sent()
            self._await_commit(step, time.monotonic() + deadline_s)
            return TransferResult(digests=[])
        write_header([extra])
        size_bytes = pieces.layout.size_bytes
        writer = self._store.writer(self._run, step, size_bytes=size_bytes, chunk_bytes=pieces.chunk_bytes)
        try:
            digests = [self._put(writer, snapshot, chunk) for chunk in range(pieces.count)]
            on_sent()
            snapshot.raise_if_torn()
            writer.publish(
                Manifest(
                    run=self._run,
                    step=step,
                    size_bytes=size_bytes,
                    chunk_bytes=pieces.chunk_bytes,
                    digests=digests,
                    created_s=time.time(),
                    world_size=self._world_size,
                    facts=facts,
                )
            )
        except BaseException:
            writer.abort()
            raise
        return TransferResult(digests=digests, bytes_sent=size_bytes)

    def _await_commit(self, step: int, ends: float) -> None:
        while step not in self._store.steps(self._run):
            if time.monotonic() > ends:
                raise StoreUnavailable(
                    f"rank 0 did not write step {step} within its deadline, or {self._store.url} is not the same place "
                    "for all ranks: give them one that is"
                )
            time.sleep(COMMIT_POLL_S)

    def _put(self, writer: Writer, snapshot: Snapshot, chunk: int) -> int:
        digest = snapshot.digest(chunk)

        def put(strips: Sequence[BufferGroup]) -> int:
            writer.put(chunk, views_of(strips), digest)
            return 0

        snapshot.hand_over(chunk, 0, put)
        snapshot.sent(chunk)
        return digest

    def close(self) -> None:
        pass
