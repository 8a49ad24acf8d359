"""What a save asks of memory nodes besides sending chunks: collect the ranks' plain values, seal, publish, abort.

Input: an upload whose chunks were sent. Output: a committed checkpoint, at enough nodes that every chunk has one.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import methodcaller
from typing import Any, TypeVar

from deepvm.checkpoint.save.save_job import save_name
from deepvm.checkpoint.save.sender_threads import Upload
from deepvm.errors import AccessDenied, CheckpointError, Corrupt, NotFound, StoreError, StoreUnavailable
from deepvm.protocol.frames import Kind
from deepvm.protocol.placement import Share, minimum_nodes
from deepvm.store.base import Manifest
from deepvm.store.memory.answers import step_rows
from deepvm.store.memory.connection import Connection
from deepvm.store.memory.store import MemoryStore
from deepvm.store.memory.upload import seal

log = logging.getLogger("deepvm.checkpoint")

T = TypeVar("T")
PUBLISH_AGAIN_S = 0.2
COMMIT_WAIT_S = 1.0  # how long one request waits for a change
ABORT_S = 1.0


class CommitClient:
    """One connection to each node, besides those that carry chunks. For one thread at a time."""

    def __init__(self, store: MemoryStore, run: str, rank: int, world_size: int) -> None:
        self._store, self._run, self._rank, self._world_size = store, run, rank, world_size
        self._connections: dict[str, Connection] = {}
        self._uncommitted: dict[int, set[str]] = {}  # steps that were published at too few nodes, and where

    def connect(self) -> int:
        """Connect to all nodes, which takes the run for this session; return the size of chunks that they keep."""
        sizes = self._each(self._store.nodes, lambda connection: int(connection.block_bytes))
        if len(set(sizes.values())) > 1:
            raise CheckpointError(f"the memory nodes keep blocks of different sizes: {sizes}")
        return next(iter(sizes.values()))

    def call(self, node: str, question: Callable[[Connection], T]) -> T:
        """Ask a node. A broken connection is dropped; if it was idle it may have broken unnoticed: ask once more."""
        if self._store.health.is_hung(node) and self._store.health.can_spare(node):
            self._drop(node)
        was_idle = node in self._connections
        while True:
            try:
                if node not in self._connections:
                    self._connections[node] = self._store.connect(node, self._run, write=True)
                return question(self._connections[node])
            except StoreError:
                if node in self._connections and not self._connections[node].broken:
                    raise  # the node refused
                self._drop(node)
                if not was_idle:
                    raise
                was_idle = False

    def _each(self, nodes: Sequence[str], question: Callable[[Connection], T]) -> dict[str, T]:
        """Ask nodes; return the answers of those that are available. Raises if none is."""
        answers: dict[str, T] = {}
        failure = StoreUnavailable("no memory node")
        for node in nodes:
            try:
                answers[node] = self.call(node, question)
            except StoreUnavailable as error:
                failure = error
        if not answers:
            raise failure
        return answers

    def abort(self, step: int, attempt: int | None = None) -> None:
        """Abort a save at the nodes that answer at once; others drop it after a time-out, or at the next attempt."""
        for node, connection in list(self._connections.items()):
            try:
                meta = {"step": step} if attempt is None else {"step": step, "attempt": attempt}
                connection.call(Kind.ABORT, meta, timeout_s=0.0, answer_s=ABORT_S)
            except StoreError:
                if connection.broken:
                    self._drop(node)

    def newest(self) -> Manifest | None:
        """Return the run's newest checkpoint at the first connected node that answers, if it has the same nodes."""
        for node, connection in list(self._connections.items()):
            try:
                steps = [row["step"] for row in step_rows(connection.call(Kind.STEPS)[0], node)]
                if not steps:
                    return None
                manifest = Manifest.from_bytes(bytes(connection.call(Kind.MANIFEST, {"step": max(steps)})[1]))
                same = (manifest.nodes, manifest.replicas) == (self._store.nodes, self._store.replicas)
                return manifest if same else None
            except StoreError:
                if connection.broken:
                    self._drop(node)
        return None

    def close(self) -> None:
        for node in list(self._connections):
            self._drop(node)

    def _drop(self, node: str) -> None:
        connection = self._connections.pop(node, None)
        if connection is not None:
            connection.close()

    # --- plain values of all ranks --------------------------------------------------------------------------------

    def exchange(self, upload: Upload, extra: str, ends_s: float) -> list[str]:
        """Bring every rank's plain values to rank 0, through every node that may be lost on the way; [] on others."""
        if self._world_size == 1:
            return [extra]
        store, document = self._store, json.dumps(extra).encode()

        def send(connection: Connection) -> None:
            upload.begin(connection, store, self._rank, self._world_size)
            connection.call(Kind.EXTRA, {"step": upload.step, "rank": self._rank}, document)

        def collect(connection: Connection) -> list[str]:
            found = store.extras(connection, upload.step, self._world_size, _left_s(ends_s))
            return [str(text) for text in found]

        received = self._each(store.nodes if store.replicas > 1 else store.nodes[:1], send)
        if self._rank != 0:
            return []
        for node in received:
            try:
                return self.call(node, collect)
            except StoreUnavailable as error:
                failure = error
        raise failure

    # --- commit -------------------------------------------------------------------------------------------------

    def commit(
        self,
        upload: Upload,
        facts: Mapping[str, Any],
        down: Sequence[str],
        ends_s: float,
        before_publishing: Callable[[], None] = lambda: None,
    ) -> tuple[list[int], tuple[str, ...]]:
        """Wait until the nodes have every chunk, of all ranks, and publish the manifest. Return the chunks' digests,
        and the nodes that do not have the checkpoint. Nodes in ``down`` are not asked."""
        store, step, sent = self._store, upload.step, upload.digests
        if all(sent) and len(store.nodes) == 1:  # this rank sent all, and the node compares when it publishes
            digests, sealed = list(sent), list(store.nodes)
        else:
            digests, sealed = self._seal(len(sent), step, down, ends_s)
        wrong = [chunk for chunk, digest in enumerate(sent) if digest and digests[chunk] != digest]
        if wrong:
            raise Corrupt(f"the memory nodes hold other bytes of chunk {wrong[0]} of step {step} than were sent")
        manifest = Manifest(
            run=self._run,
            step=step,
            size_bytes=upload.size_bytes,
            chunk_bytes=upload.chunk_bytes,
            digests=digests,
            created_s=time.time(),
            world_size=self._world_size,
            nodes=store.nodes,
            replicas=store.replicas,
            facts={**facts, "save": save_name(store.session, upload.attempt)},
        ).to_bytes()
        before_publishing()
        published = self._publish(step, manifest, sealed, ends_s)
        return digests, tuple(node for node in store.nodes if node not in published)

    def _seal(self, count: int, step: int, down: Sequence[str], ends_s: float) -> tuple[list[int], list[str]]:
        store = self._store
        digests: dict[int, int] = {}
        sealed: list[str] = []
        failure: StoreError | None = None
        for index, node in enumerate(store.nodes):
            if node in down:
                continue
            chunks = Share(nodes=len(store.nodes), index=index, replicas=store.replicas).chunks(count)
            try:
                found = self.call(node, partial(seal, step=step, chunks=chunks, timeout_s=_left_s(ends_s)))
            except (AccessDenied, Corrupt):
                raise
            except StoreError as error:  # lost, or another rank aborted there: replicas may be enough
                failure = error
                log.warning("memory node %s does not have step %d: %s", node, step, error)
                continue
            for chunk, digest in zip(chunks, found, strict=True):
                if digests.setdefault(chunk, digest) != digest:
                    raise Corrupt(f"two memory nodes hold different bytes of chunk {chunk}")
            sealed.append(node)
        if len(digests) < count:
            raise failure or StoreUnavailable("not every chunk has a memory node left")
        return [digests[chunk] for chunk in range(count)], sealed

    def _publish(self, step: int, manifest: bytes, sealed: Sequence[str], ends_s: float) -> set[str]:
        """Publish the manifest at all nodes that have the chunks. Once one has it, ask the others until they do: a node
        would take an uncommitted step for its newest, and evict a whole one for it."""
        store, published = self._store, set[str]()
        waiting = list(sealed)
        self._uncommitted[step] = published
        while True:
            failure: StoreError | None = None
            for node in list(waiting):
                meta = {"step": step, "node_index": store.nodes.index(node)}
                try:
                    self.call(node, methodcaller("call", Kind.PUBLISH, meta, manifest))
                    published.add(node)
                    waiting.remove(node)
                except StoreError as error:
                    failure = error
                    if not isinstance(error, StoreUnavailable):
                        waiting.remove(node)
            if len(published) >= minimum_nodes(len(store.nodes), store.replicas):
                del self._uncommitted[step]
                return published
            if not published or not waiting or time.monotonic() > ends_s:
                self.delete_uncommitted()
                raise failure or StoreUnavailable(f"step {step} could not be committed")
            time.sleep(PUBLISH_AGAIN_S)

    def delete_uncommitted(self) -> None:
        """Delete what a save that failed published at too few nodes, unless a node has it whole. Raises while that is
        impossible."""
        for step, nodes in list(self._uncommitted.items()):
            for node in list(nodes):
                try:
                    self.call(node, methodcaller("call", Kind.DELETE, {"step": step, "leftover": True}))
                except StoreUnavailable:
                    if not self._store.health.is_hung(node):
                        raise
                    continue  # when it answers again
                nodes.discard(node)
            if not nodes:
                del self._uncommitted[step]

    def delete_leftovers(self) -> None:
        """Delete what an earlier session left, which ended in the middle of its commit."""
        if len(self._store.nodes) > 1:
            with suppress(StoreUnavailable):
                for step, nodes in self._store.uncommitted_steps(self._run).items():
                    self._uncommitted[step] = set(nodes)
                    log.warning("step %d of run %s was never committed: deleting it", step, self._run)
                self.delete_uncommitted()

    def await_commit(self, step: int, attempt: int, ends_s: float) -> list[int]:
        """Wait, on ranks other than 0, until rank 0 has committed this very attempt; return the chunks' digests."""
        watch, name = self._store.watch(self._run), save_name(self._store.session, attempt)
        while (left_s := ends_s - time.monotonic()) > 0:
            with suppress(NotFound, StoreUnavailable):
                if watch.states(step):
                    manifest = self._store.manifest(self._run, step)
                    if manifest.facts.get("save") == name:
                        return list(manifest.digests)
            watch.wait(min(left_s, COMMIT_WAIT_S))
        raise StoreUnavailable(f"step {step} was not committed within its deadline: rank 0 did not finish")


def _left_s(ends_s: float) -> float:
    return max(0.1, ends_s - time.monotonic())
