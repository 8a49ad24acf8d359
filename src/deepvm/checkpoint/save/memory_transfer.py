"""A snapshot's way into memory nodes: several connections to each, straight from memory, verified, committed last.

Each rank sends an even share of the chunks. Nothing here is waited for by the trainer.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepvm.checkpoint.save.commit import CommitClient
from deepvm.checkpoint.save.dedup import DedupHistory
from deepvm.checkpoint.save.sender_threads import Base, Chunks, RankJob, Senders
from deepvm.checkpoint.snapshot.snapshot import Snapshot
from deepvm.checkpoint.state.chunk_map import ChunkMap
from deepvm.errors import CheckpointError, Corrupt, StoreUnavailable
from deepvm.protocol.placement import replica_nodes
from deepvm.store.base import chunk_count
from deepvm.store.memory.store import MemoryStore

log = logging.getLogger("deepvm.checkpoint")

STOP_S = 15.0  # a sender that is interrupted ends at once, or when its attempt to connect does


@dataclass(kw_only=True)
class TransferResult:
    """What a save moved."""

    digests: list[int]
    base: Base | None = None  # what it was compared with
    bytes_sent: int = 0
    bytes_kept: int = 0  # at the nodes already, and not sent again
    nodes_down: tuple[str, ...] = ()


def share(chunks: int, of_header: int, rank: int, world_size: int) -> range:
    """The chunks that a rank sends. The first ones, with the header, are rank 0's."""
    first = 0 if rank == 0 else max(of_header, chunks * rank // world_size)
    last = max(of_header, chunks * (rank + 1) // world_size)
    return range(min(first, chunks), min(last, chunks))


Texts = dict[str, bytearray]  # a rank's plain values, as JSON by component


class MemoryTransfer:
    """All saves of one rank into one memory store."""

    def __init__(self, store: MemoryStore, run: str, rank: int = 0, world_size: int = 1) -> None:
        self._store, self._run, self._rank, self._world_size = store, run, rank, world_size
        self._senders: dict[str, Senders] = {}
        self._control = CommitClient(store, run, rank, world_size)
        self._tidied = False
        self._base: Base | None = None
        self._offers = DedupHistory()

    def block_bytes(self) -> int:
        """The size of chunks that all nodes keep. The first call also takes the run for this session."""
        found = self._control.block_bytes()
        if self._rank == 0 and not self._tidied:
            self._control.find_halves()
            self._tidied = True
        return found

    def copies(self, pieces: ChunkMap) -> list[int]:
        """How many copies of each chunk this rank sends."""
        mine = share(pieces.count, pieces.of_header, self._rank, self._world_size)
        return [self._store.replicas if chunk in mine else 0 for chunk in range(pieces.count)]

    def plain_values(self, step: int, texts: Texts, *, otherwise: Callable[[], None]) -> Texts | str:  # noqa: ARG002
        """This rank's alone: ranks bring theirs to the first node."""
        return texts

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
        attempt: int = 0,
    ) -> TransferResult:
        """Send, wait for the other ranks, and commit. ``write_header`` is given all ranks' extras, on rank 0."""
        try:
            ends = time.monotonic() + deadline_s
            if self._rank == 0:
                self._control.forget_halves()
            sent = self._send(snapshot, step, attempt, extra, write_header, on_sent, ends)
            if self._rank == 0:
                sent.digests, sent.nodes_down = self._control.commit(
                    snapshot.pieces, step, facts, sent.nodes_down, ends,
                    attempt=attempt, known=sent.digests, before_publishing=snapshot.raise_if_torn,
                )  # fmt: skip
            else:
                sent.digests = self._control.await_commit(step, attempt, ends)
        except BaseException:
            self._base = None
            self._control.abort(step, attempt)
            raise
        layout = snapshot.pieces.layout
        self._base = Base(
            step=step, fingerprint=layout.fingerprint, header_bytes=layout.header_bytes, digests=sent.digests,
            changing=_changing(sent),
        )  # fmt: skip
        return sent

    def _send(
        self,
        snapshot: Snapshot,
        step: int,
        attempt: int,
        extra: str,
        write_header: Callable[[Sequence[str]], None],
        on_sent: Callable[[], None],
        ends: float,
    ) -> TransferResult:
        pieces, layout = snapshot.pieces, snapshot.pieces.layout
        mine = share(pieces.count, pieces.of_header, self._rank, self._world_size)
        base, digests = self._base_of(pieces), [0] * pieces.count
        offering = self._offers.begin(f"{layout.fingerprint}/{layout.header_bytes}")
        partial = self._offers.partial_reservation
        jobs = self._jobs(
            snapshot, step, layout.size_bytes, pieces.chunk_bytes,
            layout=layout.fingerprint, base=base, digests=digests, attempt=attempt, offering=offering, partial=partial,
        )  # fmt: skip
        for node, job in jobs.items():
            self._sender(node).start(job)
        try:
            self._enqueue(jobs, [chunk for chunk in mine if chunk >= pieces.of_header])
            extras = self._control.exchange(
                step, attempt, layout.size_bytes, layout.fingerprint, extra, ends, partial=partial
            )
            if self._rank == 0:
                for job in jobs.values():  # the header takes a while, and leaves last
                    job.begun.wait(max(0.0, ends - time.monotonic()))
                write_header(extras)
            self._enqueue(jobs, [chunk for chunk in mine if chunk < pieces.of_header])
        except BaseException as error:
            self._stop(jobs, error)
            raise
        finally:
            for job in jobs.values():
                job.waiting.put(None)
        try:
            self._await(jobs, ends)
        finally:
            self._offers.learn(jobs.values(), failed=any(job.failure is not None for job in jobs.values()))
        snapshot.raise_if_torn()
        on_sent()
        return self._sent(jobs, digests, base)

    def send(
        self, source: Chunks, chunks: Sequence[int], step: int, size_bytes: int, chunk_bytes: int,
        *, layout: str, base: Base | None, ends: float, offering: bool = False,
    ) -> TransferResult:  # fmt: skip
        """Send some chunks of a checkpoint that others may send other chunks of; nothing is committed."""
        digests = [0] * chunk_count(size_bytes, chunk_bytes)
        jobs = self._jobs(
            source, step, size_bytes, chunk_bytes, layout=layout, base=base, digests=digests, offering=offering
        )
        self._enqueue(jobs, chunks)
        for node, job in jobs.items():
            job.waiting.put(None)
            self._sender(node).start(job)
        self._await(jobs, ends)
        return self._sent(jobs, digests, base)

    def commit(
        self, pieces: ChunkMap, step: int, facts: Mapping[str, Any], down: Sequence[str], ends: float
    ) -> list[int]:
        """Wait until every chunk has arrived, from whatever rank, and write the manifest; the chunks' digests."""
        return self._control.commit(pieces, step, facts, down, ends)[0]

    def abort(self, step: int) -> None:
        self._base = None
        self._control.abort(step)

    def close(self) -> None:
        for senders in self._senders.values():
            senders.close()
        self._control.close()
        self._senders = {}

    # --- parts --------------------------------------------------------------------------------------------------

    def _base_of(self, pieces: ChunkMap) -> Base | None:
        """The last save, or the newest checkpoint that an earlier process left: what is as it was there is not sent."""
        layout, base = pieces.layout, self._base
        if base is not None:
            same = (base.fingerprint, base.header_bytes) == (layout.fingerprint, layout.header_bytes)
            return base if same else None
        found = self._control.newest()
        if found is None or (found.size_bytes, found.chunk_bytes) != (layout.size_bytes, pieces.chunk_bytes):
            return None
        return Base(
            step=found.step,
            fingerprint=layout.fingerprint,
            header_bytes=layout.header_bytes,
            digests=found.digests,
        )

    def _jobs(
        self, source: Chunks, step: int, size_bytes: int, chunk_bytes: int,
        *, layout: str, base: Base | None, digests: list[int], attempt: int = 0, offering: bool = False,
        partial: bool = False,
    ) -> dict[str, RankJob]:  # fmt: skip
        return {
            node: RankJob(
                source=source, step=step, size_bytes=size_bytes, chunk_bytes=chunk_bytes,
                layout=layout, base=base, digests=digests, waiting=queue.SimpleQueue(), senders=0, attempt=attempt,
                offering=offering, partial_reservation=partial,
            )
            for node in self._store.nodes
        }  # fmt: skip

    def _enqueue(self, jobs: Mapping[str, RankJob], chunks: Sequence[int]) -> None:
        nodes = self._store.nodes
        for chunk in chunks:
            for home in replica_nodes(chunk, len(nodes), self._store.replicas):
                jobs[nodes[home]].waiting.put(chunk)

    def _sender(self, node: str) -> Senders:
        if node not in self._senders:
            self._senders[node] = Senders(self._store, node, self._run, self._rank, self._world_size)
        return self._senders[node]

    def _await(self, jobs: Mapping[str, RankJob], ends: float) -> None:
        for node, job in jobs.items():
            if not job.finished.wait(max(0.0, ends - time.monotonic())):
                late = StoreUnavailable(f"memory node {node} did not take the checkpoint within its deadline")
                self._stop(jobs, late)
                raise late

    def _sent(self, jobs: Mapping[str, RankJob], digests: list[int], base: Base | None) -> TransferResult:
        down = tuple(node for node, job in jobs.items() if job.failure is not None)
        self._check_losses(jobs, down)
        return TransferResult(
            digests=digests,
            base=base,
            bytes_sent=sum(job.bytes_sent for job in jobs.values()),
            bytes_kept=sum(job.bytes_kept + job.bytes_linked for job in jobs.values()),
            nodes_down=down,
        )

    def _stop(self, jobs: Mapping[str, RankJob], why: BaseException) -> None:
        """Nothing of this save may be sent any more: staging memory belongs to the next one."""
        for node, job in jobs.items():
            with job.lock:
                job.failure = job.failure or why
            job.waiting.put(None)
            if not job.finished.is_set():
                self._sender(node).interrupt()
        for job in jobs.values():
            job.finished.wait(STOP_S)

    def _check_losses(self, jobs: Mapping[str, RankJob], down: Sequence[str]) -> None:
        """Some nodes may have failed as long as every chunk has a home left."""
        if not down:
            return
        self._base = None
        failures = [failure for node in down if (failure := jobs[node].failure) is not None]
        for failure in failures:
            if isinstance(failure, Corrupt):
                raise CheckpointError(f"a tensor was changed in place while it was sent, or on its way: {failure}")
            if len(down) >= self._store.replicas or not isinstance(failure, StoreUnavailable):
                raise failure
        for node, failure in zip(down, failures, strict=True):
            log.warning("memory node %s has no part in step %d: %s", node, jobs[node].step, failure)


def _changing(sent: TransferResult) -> frozenset[int]:
    if sent.base is None:
        return frozenset()
    return frozenset(c for c, (was, now) in enumerate(zip(sent.base.digests, sent.digests, strict=True)) if was != now)
