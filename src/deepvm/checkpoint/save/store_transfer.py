"""A snapshot into a store without memory nodes: a file system, or object storage. Rank 0 writes all of it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import xxhash

from deepvm.checkpoint import ranks
from deepvm.checkpoint.save.save_job import SaveJob, Texts, is_committed, save_name
from deepvm.checkpoint.snapshot.snapshot import Snapshot
from deepvm.checkpoint.state.capture import join
from deepvm.checkpoint.state.chunk_map import ChunkMap
from deepvm.errors import StoreUnavailable
from deepvm.store.base import DEFAULT_CHUNK_BYTES, Manifest, Store, Writer

COMMIT_POLL_S = 0.05  # files and buckets cannot report a change


class StoreTransfer:
    def __init__(self, store: Store, run: str, rank: int, world_size: int, session: str) -> None:
        self._store, self._run, self._rank, self._world_size = store, run, rank, world_size
        self._session = session

    def prepare(self) -> int:
        """Return the size of chunks."""
        return DEFAULT_CHUNK_BYTES

    def copies(self, chunk_map: ChunkMap) -> list[int]:
        return [1 if self._rank == 0 else 0] * chunk_map.count

    def plain_values(self, step: int, texts: Texts) -> Texts | str:
        """Join the plain values of all ranks: the store cannot collect them."""
        return texts if self._world_size == 1 else ", ".join(ranks.gather_texts(f"save({step})", join(texts)))

    def save(self, job: SaveJob) -> None:
        """Write the snapshot and commit it; on ranks other than 0, wait for that: the state is the same on all."""
        snapshot, step, chunk_map = job.snapshot, job.handle.step, job.snapshot.chunk_map
        name = save_name(self._session, job.handle.attempt)
        if self._rank != 0:
            job.handle.advance("staged")
            self._await_commit(step, name, job.ends_s)
            return
        job.write_header([job.skeleton()])
        size_bytes = chunk_map.layout.size_bytes
        writer = self._store.writer(self._run, step, size_bytes=size_bytes, chunk_bytes=chunk_map.chunk_bytes)
        try:
            digests = [self._put(writer, snapshot, chunk) for chunk in range(chunk_map.count)]
            job.handle.advance("staged")
            snapshot.raise_if_torn()
            writer.publish(
                Manifest(
                    run=self._run,
                    step=step,
                    size_bytes=size_bytes,
                    chunk_bytes=chunk_map.chunk_bytes,
                    digests=digests,
                    created_s=time.time(),
                    world_size=self._world_size,
                    facts={**job.facts, "save": name},
                )
            )
        except BaseException:
            writer.abort()
            raise
        job.handle.bytes_sent = size_bytes

    def _await_commit(self, step: int, name: str, ends_s: float) -> None:
        while not is_committed(self._store, self._run, step, name):
            if time.monotonic() > ends_s:
                raise StoreUnavailable(
                    f"rank 0 did not write step {step} within its deadline, or ranks do not share {self._store.url}: "
                    "give all ranks the same store"
                )
            time.sleep(COMMIT_POLL_S)

    def _put(self, writer: Writer, snapshot: Snapshot, chunk: int) -> int:
        digest = 0

        def put(views: Sequence[memoryview]) -> None:
            nonlocal digest
            hasher = xxhash.xxh3_64()
            for view in views:
                hasher.update(view)
            digest = hasher.intdigest()
            writer.put(chunk, views, digest)

        snapshot.whole(chunk, put)
        snapshot.sent(chunk)
        return digest

    def close(self) -> None:
        pass
