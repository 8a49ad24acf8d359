"""A snapshot's way into memory nodes: several connections to each, straight from memory, verified, committed last.

Each rank sends an even share of the chunks. Nothing here is waited for by the trainer.
"""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from deepvm.checkpoint.pieces import Pieces
from deepvm.checkpoint.senders import Base, Chunks, Job, Senders
from deepvm.checkpoint.snapshot import Snapshot
from deepvm.errors import CheckpointError, Corrupt, NotFound, StoreError, StoreUnavailable
from deepvm.memnode.wire import Kind
from deepvm.store.base import Manifest, chunk_count
from deepvm.store.connection import Connection
from deepvm.store.memory import MemoryStore, begin, home_nodes, seal


@dataclass(kw_only=True)
class Sent:
    """What a save moved."""

    digests: list[int]
    bytes_sent: int = 0
    bytes_kept: int = 0
    nodes_down: tuple[str, ...] = ()


def share(chunks: int, of_header: int, rank: int, world_size: int) -> range:
    """The chunks that a rank sends. The first ones, with the header, are rank 0's."""
    first = 0 if rank == 0 else max(of_header, chunks * rank // world_size)
    last = max(of_header, chunks * (rank + 1) // world_size)
    return range(min(first, chunks), min(last, chunks))


class MemoryTransfer:
    """All saves of one rank into one memory store."""

    def __init__(self, store: MemoryStore, run: str, rank: int = 0, world_size: int = 1) -> None:
        self._store, self._run, self._rank, self._world_size = store, run, rank, world_size
        self._senders: dict[str, Senders] = {}
        self._control: dict[str, Connection] = {}
        self._base: Base | None = None

    def block_bytes(self) -> int:
        """The size of chunks that all nodes keep."""
        sizes, failure = {}, None
        for node in self._store.nodes:
            try:
                sizes[node] = self._connected(node).block_bytes
            except StoreUnavailable as error:
                failure = error
        if not sizes:
            raise failure or StoreUnavailable("no memory node")
        if len(set(sizes.values())) > 1:
            raise CheckpointError(f"the memory nodes keep blocks of different sizes: {sizes}")
        return next(iter(sizes.values()))

    def copies(self, pieces: Pieces) -> list[int]:
        """How many copies of each chunk this rank sends."""
        mine = share(pieces.count, pieces.of_header, self._rank, self._world_size)
        return [self._store.replicas if chunk in mine else 0 for chunk in range(pieces.count)]

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
    ) -> Sent:
        """Send, wait for the other ranks, and commit. ``write_header`` is given all ranks' extras, on rank 0."""
        try:
            sent = self._send(snapshot, step, extra, write_header, on_sent, ends := time.monotonic() + deadline_s)
            if self._rank == 0:
                sent.digests = self.commit(snapshot.pieces, step, facts, sent.nodes_down, ends)
            else:
                sent.digests = self._await_commit(step, ends)
        except BaseException:
            self.abort(step)
            raise
        layout = snapshot.pieces.layout
        self._base = Base(
            step=step, fingerprint=layout.fingerprint, header_bytes=layout.header_bytes, digests=sent.digests
        )
        return sent

    def _send(
        self,
        snapshot: Snapshot,
        step: int,
        extra: str,
        write_header: Callable[[Sequence[str]], None],
        on_sent: Callable[[], None],
        ends: float,
    ) -> Sent:
        pieces, layout = snapshot.pieces, snapshot.pieces.layout
        mine = share(pieces.count, pieces.of_header, self._rank, self._world_size)
        base = self._base
        if base is not None and (base.fingerprint, base.header_bytes) != (layout.fingerprint, layout.header_bytes):
            base = None
        digests = [0] * pieces.count
        jobs = self._jobs(
            snapshot, step, layout.size_bytes, pieces.chunk_bytes,
            layout=layout.fingerprint, base=base, digests=digests,
        )  # fmt: skip
        self._enqueue(jobs, [chunk for chunk in mine if chunk >= pieces.of_header])
        for node, job in jobs.items():
            self._sender(node).start(job)
        try:
            extras = self._exchange(step, layout.size_bytes, layout.fingerprint, extra, ends)
            if self._rank == 0:
                write_header(extras)
            self._enqueue(jobs, [chunk for chunk in mine if chunk < pieces.of_header])
        except BaseException as error:
            for job in jobs.values():
                job.failure = job.failure or error
            raise
        finally:
            for job in jobs.values():
                job.waiting.put(None)
        self._await(jobs, ends)
        snapshot.check_untorn()
        on_sent()
        if snapshot.torn:
            raise CheckpointError(snapshot.torn)
        down = tuple(node for node, job in jobs.items() if job.failure is not None)
        self._check_losses(jobs, down)
        return Sent(
            digests=digests,
            bytes_sent=sum(job.bytes_sent for job in jobs.values()),
            bytes_kept=sum(job.bytes_kept for job in jobs.values()),
            nodes_down=down,
        )

    def send(
        self, source: Chunks, chunks: Sequence[int], step: int, size_bytes: int, chunk_bytes: int,
        *, layout: str, base: Base | None, ends: float,
    ) -> Sent:  # fmt: skip
        """Send some chunks of a checkpoint that others may send other chunks of; nothing is committed."""
        digests = [0] * chunk_count(size_bytes, chunk_bytes)
        jobs = self._jobs(source, step, size_bytes, chunk_bytes, layout=layout, base=base, digests=digests)
        self._enqueue(jobs, chunks)
        for node, job in jobs.items():
            job.waiting.put(None)
            self._sender(node).start(job)
        self._await(jobs, ends)
        down = tuple(node for node, job in jobs.items() if job.failure is not None)
        self._check_losses(jobs, down)
        return Sent(
            digests=digests,
            bytes_sent=sum(job.bytes_sent for job in jobs.values()),
            bytes_kept=sum(job.bytes_kept for job in jobs.values()),
            nodes_down=down,
        )

    def abort(self, step: int) -> None:
        self._base = None
        for connection in self._control.values():
            with suppress(StoreError):
                connection.call(Kind.ABORT, {"step": step})

    def close(self) -> None:
        for senders in self._senders.values():
            senders.close()
        for connection in self._control.values():
            connection.close()
        self._senders, self._control = {}, {}

    # --- parts --------------------------------------------------------------------------------------------------

    def _jobs(
        self, source: Chunks, step: int, size_bytes: int, chunk_bytes: int,
        *, layout: str, base: Base | None, digests: list[int],
    ) -> dict[str, Job]:  # fmt: skip
        return {
            node: Job(
                source=source, step=step, size_bytes=size_bytes, chunk_bytes=chunk_bytes,
                layout=layout, base=base, digests=digests, waiting=queue.SimpleQueue(), senders=0,
            )
            for node in self._store.nodes
        }  # fmt: skip

    def _enqueue(self, jobs: Mapping[str, Job], chunks: Sequence[int]) -> None:
        nodes = self._store.nodes
        for chunk in chunks:
            for home in home_nodes(chunk, len(nodes), self._store.replicas):
                jobs[nodes[home]].waiting.put(chunk)

    def _sender(self, node: str) -> Senders:
        if node not in self._senders:
            self._senders[node] = Senders(self._store, node, self._run, self._rank, self._world_size)
        return self._senders[node]

    def _connected(self, node: str) -> Connection:
        if node not in self._control:
            self._control[node] = self._store.connect(node, self._run, write=True)
        return self._control[node]

    def _control_call(self, node: str, question: Callable[[Connection], Any]) -> Any:
        """A call on a node's control connection. One that fails is dropped, and made anew the next time."""
        waited = node in self._control
        try:
            return question(self._connected(node))
        except (StoreUnavailable, Corrupt):
            stale = self._control.pop(node, None)
            if stale is not None:
                stale.close()
            if not waited:
                raise
        return question(self._connected(node))

    def _exchange(self, step: int, size_bytes: int, layout: str, extra: str, ends: float) -> Sequence[Any]:
        """Bring every rank's own state to rank 0, through the first node that answers."""
        if self._world_size == 1:
            return [extra]
        failure: StoreError | None = None
        for node in self._store.nodes:
            try:
                return self._exchange_at(node, step, size_bytes, layout, extra, ends)
            except StoreUnavailable as error:
                failure = error
        raise failure or StoreUnavailable("no memory node")

    def _exchange_at(
        self, node: str, step: int, size_bytes: int, layout: str, extra: str, ends: float
    ) -> Sequence[Any]:
        document = json.dumps(extra).encode()

        def tell(connection: Connection) -> None:
            begin(
                connection, step, size_bytes, connection.block_bytes,
                layout=layout, rank=self._rank, world_size=self._world_size,
            )  # fmt: skip
            connection.call(Kind.EXTRA, {"step": step, "rank": self._rank}, document)

        self._control_call(node, tell)
        if self._rank != 0:
            return []
        left_s = max(1.0, ends - time.monotonic())
        found = self._control_call(node, lambda c: self._store.extras(c, step, self._world_size, left_s))
        return list(found)

    def _await(self, jobs: Mapping[str, Job], ends: float) -> None:
        for node, job in jobs.items():
            if not job.finished.wait(max(0.0, ends - time.monotonic())):
                job.failure = StoreUnavailable(f"memory node {node} did not take the checkpoint within its deadline")
                raise job.failure

    def _check_losses(self, jobs: Mapping[str, Job], down: Sequence[str]) -> None:
        """Some nodes may have failed as long as every chunk has a home left."""
        if not down:
            return
        self._base = None
        failure = jobs[down[0]].failure
        assert failure is not None  # noqa: S101 - that is what down means
        if len(down) >= self._store.replicas or not isinstance(failure, StoreUnavailable):
            raise failure

    def commit(
        self, pieces: Pieces, step: int, facts: Mapping[str, Any], down: Sequence[str], ends: float
    ) -> list[int]:
        """Wait until every chunk has arrived, from whatever rank, and write the manifest; the chunks' digests."""
        store = self._store
        digests: list[int | None] = [None] * pieces.count
        sealed = []
        failure: StoreError | None = None
        for index, node in enumerate(store.nodes):
            if node in down:
                continue
            chunks = [c for c in range(pieces.count) if index in home_nodes(c, len(store.nodes), store.replicas)]
            try:
                timeout_s = max(1.0, ends - time.monotonic())
                found = self._control_call(node, _sealing(step, chunks, timeout_s))
            except StoreUnavailable as error:
                failure = error
                continue
            for chunk, digest in zip(chunks, found, strict=True):
                if digests[chunk] not in (None, digest):
                    raise Corrupt(f"two memory nodes hold different bytes of chunk {chunk}")
                digests[chunk] = digest
            sealed.append(index)
        if any(digest is None for digest in digests):
            raise failure or StoreUnavailable("not every chunk has a memory node left")
        whole = [digest for digest in digests if digest is not None]
        manifest = Manifest(
            run=self._run,
            step=step,
            size_bytes=pieces.layout.size_bytes,
            chunk_bytes=pieces.chunk_bytes,
            digests=whole,
            created_s=time.time(),
            world_size=self._world_size,
            nodes=store.nodes,
            replicas=store.replicas,
            facts=facts,
        ).to_bytes()
        for index in sealed:
            self._control_call(
                store.nodes[index],
                lambda c, i=index: c.call(Kind.PUBLISH, {"step": step, "node_index": i}, manifest),  # type: ignore[misc]
            )
        return whole

    def _await_commit(self, step: int, ends: float) -> list[int]:
        while time.monotonic() < ends:
            with suppress(NotFound, StoreUnavailable):
                return list(self._store.manifest(self._run, step).digests)
            time.sleep(0.02)
        raise StoreUnavailable(f"step {step} was not committed within its deadline: rank 0 did not finish")


def _sealing(step: int, chunks: Sequence[int], timeout_s: float) -> Callable[[Connection], list[int]]:
    return lambda connection: seal(connection, step, chunks, timeout_s)
