"""A snapshot into memory nodes: several connections to each, straight from memory, verified, committed last.

Each rank sends an even share of the chunks. The trainer never waits for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepvm.checkpoint.save.commit import CommitClient
from deepvm.checkpoint.save.dedup import DedupHistory
from deepvm.checkpoint.save.save_job import SaveJob, Texts
from deepvm.checkpoint.save.sender_threads import Base, NodeUpload, Senders, Upload
from deepvm.checkpoint.state.chunk_map import ChunkMap
from deepvm.errors import CheckpointError, Corrupt, StoreUnavailable
from deepvm.protocol.placement import replica_nodes
from deepvm.store.memory.store import MemoryStore

log = logging.getLogger("deepvm.checkpoint")

STOP_S = 15.0  # a sender that is interrupted ends at once, or when its attempt to connect does


@dataclass(frozen=True, kw_only=True)
class TransferResult:
    """What an upload moved."""

    digests: list[int]  # by chunk; 0 for those of other ranks
    bytes_sent: int = 0
    bytes_kept: int = 0  # at the nodes already, and not sent again
    nodes_down: tuple[str, ...] = ()


class MemoryTransfer:
    """All saves of one rank into one memory store."""

    def __init__(self, store: MemoryStore, run: str, rank: int = 0, world_size: int = 1) -> None:
        self._store, self._run, self._rank, self._world_size = store, run, rank, world_size
        self._senders: dict[str, Senders] = {}
        self._commit_client = CommitClient(store, run, rank, world_size)
        self._prepared = False
        self._base: Base | None = None
        self._dedup = DedupHistory()

    def prepare(self) -> int:
        """Connect, delete what an earlier session left uncommitted, and return the size of chunks."""
        chunk_bytes = self._commit_client.connect()
        if self._rank == 0 and not self._prepared:
            self._commit_client.delete_leftovers()
            self._prepared = True
        return chunk_bytes

    def copies(self, chunk_map: ChunkMap) -> list[int]:
        """Return how many copies of each chunk this rank sends."""
        mine = self._share(chunk_map)
        return [self._store.replicas if chunk in mine else 0 for chunk in range(chunk_map.count)]

    def plain_values(self, step: int, texts: Texts) -> Texts | str:  # noqa: ARG002
        """Return this rank's alone: a node collects those of all ranks."""
        return texts

    def save(self, job: SaveJob) -> None:
        """Send this rank's share, wait for the other ranks, and commit."""
        client, handle = self._commit_client, job.handle
        try:
            if self._rank == 0:
                client.delete_uncommitted()
            upload = self._upload(job)
            sent = self._send_job(upload, job)
            if self._rank == 0:
                digests, job.nodes_down = client.commit(
                    upload, job.facts, sent.nodes_down, job.ends_s, job.snapshot.raise_if_torn
                )
            else:
                digests, job.nodes_down = client.await_commit(handle.step, handle.attempt, job.ends_s), sent.nodes_down
        except BaseException:
            self._base = None
            client.abort(handle.step, handle.attempt)
            raise
        handle.bytes_sent, handle.bytes_kept = sent.bytes_sent, sent.bytes_kept
        before = digests if upload.base is None else upload.base.digests
        self._base = Base(
            step=handle.step,
            layout=upload.layout,
            digests=digests,
            changing=frozenset(c for c, (was, now) in enumerate(zip(before, digests, strict=True)) if was != now),
        )

    def _upload(self, job: SaveJob) -> Upload:
        chunk_map, layout = job.snapshot.chunk_map, job.snapshot.chunk_map.layout
        offering = self._dedup.begin(layout.fingerprint)
        return Upload(
            source=job.snapshot,
            step=job.handle.step,
            size_bytes=layout.size_bytes,
            chunk_bytes=chunk_map.chunk_bytes,
            layout=layout.fingerprint,
            base=self._base_of(chunk_map),
            attempt=job.handle.attempt,
            offering=offering,
            partial_reservation=self._dedup.partial_reservation,
        )

    def _send_job(self, upload: Upload, job: SaveJob) -> TransferResult:
        """Send this rank's share of a checkpoint: the tensors at once, the header when all ranks' values are there."""
        mine, header_chunks = self._share(job.snapshot.chunk_map), job.snapshot.chunk_map.header_chunks
        uploads = self._start(upload)
        try:
            self._enqueue(uploads, [chunk for chunk in mine if chunk >= header_chunks])
            skeletons = self._commit_client.exchange(upload, job.skeleton(), job.ends_s)
            if self._rank == 0:
                for one in uploads.values():  # the header takes a while, and leaves last
                    one.begun.wait(max(0.0, job.ends_s - time.monotonic()))
                job.write_header(skeletons)
            self._enqueue(uploads, [chunk for chunk in mine if chunk < header_chunks])
        except BaseException as error:
            self._stop(uploads, error)
            raise
        try:
            self._await(uploads, job.ends_s)
        finally:
            failed = any(one.failure is not None for one in uploads.values())
            self._dedup.learn(uploads.values(), failed=failed)
        job.snapshot.raise_if_torn()
        job.handle.advance("staged")
        return self._result(upload, uploads)

    def send(self, upload: Upload, chunks: Sequence[int], ends_s: float) -> TransferResult:
        """Send some chunks of a checkpoint, of which others may send other chunks; nothing is committed."""
        uploads = self._start(upload)
        self._enqueue(uploads, chunks)
        self._await(uploads, ends_s)
        return self._result(upload, uploads)

    def commit(self, upload: Upload, facts: Mapping[str, Any], down: Sequence[str], ends_s: float) -> None:
        """Wait until the nodes have every chunk, of all ranks, and publish the manifest."""
        self._commit_client.commit(upload, facts, down, ends_s)

    def abort(self, step: int) -> None:
        self._base = None
        self._commit_client.abort(step)

    def close(self) -> None:
        for senders in self._senders.values():
            senders.close()
        self._commit_client.close()
        self._senders = {}

    # --- parts --------------------------------------------------------------------------------------------------

    def _share(self, chunk_map: ChunkMap) -> range:
        """Return the chunks that this rank sends. The first ones, with the header, are rank 0's."""
        count, header_chunks = chunk_map.count, chunk_map.header_chunks
        first = 0 if self._rank == 0 else max(header_chunks, count * self._rank // self._world_size)
        last = max(header_chunks, count * (self._rank + 1) // self._world_size)
        return range(min(first, count), min(last, count))

    def _base_of(self, chunk_map: ChunkMap) -> Base | None:
        """Return the last save, or the newest checkpoint of an earlier process, if its layout is the same."""
        layout, base = chunk_map.layout, self._base
        if base is not None:
            return base if base.layout == layout.fingerprint else None
        found = self._commit_client.newest()
        if found is None or (found.size_bytes, found.chunk_bytes) != (layout.size_bytes, chunk_map.chunk_bytes):
            return None
        return Base(step=found.step, layout=layout.fingerprint, digests=found.digests)

    def _start(self, upload: Upload) -> dict[str, NodeUpload]:
        uploads = {node: NodeUpload(upload) for node in self._store.nodes}
        for node, one in uploads.items():
            if node not in self._senders:
                self._senders[node] = Senders(self._store, node, self._run, self._rank, self._world_size)
            self._senders[node].start(one)
        return uploads

    def _enqueue(self, uploads: Mapping[str, NodeUpload], chunks: Sequence[int]) -> None:
        nodes = self._store.nodes
        for chunk in chunks:
            for home in replica_nodes(chunk, len(nodes), self._store.replicas):
                uploads[nodes[home]].waiting.put(chunk)

    def _await(self, uploads: Mapping[str, NodeUpload], ends_s: float) -> None:
        """Wait until the senders have sent what is enqueued: nothing follows it."""
        for one in uploads.values():
            one.waiting.put(None)
        for node, one in uploads.items():
            if not one.finished.wait(max(0.0, ends_s - time.monotonic())):
                late = StoreUnavailable(f"memory node {node} did not receive the checkpoint within its deadline")
                self._stop(uploads, late)
                raise late

    def _stop(self, uploads: Mapping[str, NodeUpload], why: BaseException) -> None:
        """Stop sending: staging memory belongs to the next save."""
        for node, one in uploads.items():
            one.fail(why)
            one.waiting.put(None)
            if not one.finished.is_set():
                self._senders[node].interrupt()
        for one in uploads.values():
            one.finished.wait(STOP_S)

    def _result(self, upload: Upload, uploads: Mapping[str, NodeUpload]) -> TransferResult:
        """Sum up what was moved. Raises unless every chunk has a node left."""
        failures = {node: one.failure for node, one in uploads.items() if one.failure is not None}
        for failure in failures.values():
            self._base = None
            if isinstance(failure, Corrupt):
                raise CheckpointError(f"a tensor was changed in place while it was sent, or on its way: {failure}")
            if len(failures) >= self._store.replicas or not isinstance(failure, StoreUnavailable):
                raise failure
        for node, failure in failures.items():
            log.warning("memory node %s does not have step %d: %s", node, upload.step, failure)
        return TransferResult(
            digests=upload.digests,
            bytes_sent=sum(one.bytes_sent for one in uploads.values()),
            bytes_kept=sum(one.bytes_kept + one.bytes_linked for one in uploads.values()),
            nodes_down=tuple(failures),
        )
