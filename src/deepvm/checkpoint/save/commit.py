"""What a save says to memory nodes beside its chunks: that ranks meet, and that the checkpoint exists from now on."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from deepvm.checkpoint.state.chunk_map import ChunkMap
from deepvm.errors import AccessDenied, CheckpointError, Corrupt, NotFound, StoreError, StoreUnavailable
from deepvm.protocol.frames import Kind, fingerprint
from deepvm.protocol.placement import replica_nodes
from deepvm.store.base import Manifest
from deepvm.store.memory.connection import Connection
from deepvm.store.memory.store import MemoryStore
from deepvm.store.memory.upload import begin, seal

log = logging.getLogger("deepvm.checkpoint")

T = TypeVar("T")
PUBLISH_AGAIN_S = 0.2
COMMIT_POLL_S = 0.02
ABORT_S = 1.0


class CommitClient:
    """One connection to each node, beside those that carry chunks. For one thread at a time."""

    def __init__(self, store: MemoryStore, run: str, rank: int, world_size: int) -> None:
        self._store, self._run, self._rank, self._world_size = store, run, rank, world_size
        self._connections: dict[str, Connection] = {}
        self._half: dict[int, set[str]] = {}  # steps that were published at some nodes only, and where

    def block_bytes(self) -> int:
        """The size of chunks that all nodes keep."""
        sizes, failure = {}, None
        for node in self._store.nodes:
            try:
                sizes[node] = self.call(node, lambda connection: int(connection.block_bytes))
            except StoreUnavailable as error:
                failure = error
        if not sizes:
            raise failure or StoreUnavailable("no memory node")
        if len(set(sizes.values())) > 1:
            raise CheckpointError(f"the memory nodes keep blocks of different sizes: {sizes}")
        return next(iter(sizes.values()))

    def call(self, node: str, question: Callable[[Connection], T]) -> T:
        """Ask a node. A connection that failed is dropped; one that waited may have died unnoticed: asked anew."""
        if self._store.health.is_hung(node) and self._store.health.can_spare(node):
            self._drop(node)
        waited = node in self._connections
        try:
            return question(self._connected(node))
        except StoreError:
            if node in self._connections and not self._connections[node].broken:
                raise  # it said no
            self._drop(node)
            if not waited:
                raise
        try:
            return question(self._connected(node))
        except StoreError:
            if node in self._connections and self._connections[node].broken:
                self._drop(node)
            raise

    def abort(self, step: int, attempt: int | None = None) -> None:
        """As far as nodes can be told at once; those that cannot drop it when they miss it, or at the next attempt."""
        for node, connection in list(self._connections.items()):
            try:
                meta = {"step": step} if attempt is None else {"step": step, "attempt": attempt}
                connection.call(Kind.ABORT, meta, timeout_s=0.0, answer_s=ABORT_S)
            except StoreError:
                if connection.broken:
                    self._drop(node)

    def newest(self) -> Manifest | None:
        """The run's newest checkpoint, as the first node tells it that is connected and shares the chunks as now."""
        for node, connection in list(self._connections.items()):
            try:
                steps = [int(row["step"]) for row in connection.call(Kind.STEPS)[0]["steps"]]
                if not steps:
                    return None
                manifest = Manifest.from_bytes(bytes(connection.call(Kind.MANIFEST, {"step": max(steps)})[1]))
                shared_as_now = (manifest.nodes, manifest.replicas) == (self._store.nodes, self._store.replicas)
                return manifest if shared_as_now else None
            except (StoreError, KeyError, TypeError, ValueError):  # or no memory node at all
                if connection.broken:
                    self._drop(node)
        return None

    def close(self) -> None:
        for node in list(self._connections):
            self._drop(node)

    def _connected(self, node: str) -> Connection:
        if node not in self._connections:
            self._connections[node] = self._store.connect(node, self._run, write=True)
        return self._connections[node]

    def _drop(self, node: str) -> None:
        connection = self._connections.pop(node, None)
        if connection is not None:
            connection.close()

    # --- ranks meet ---------------------------------------------------------------------------------------------

    def exchange(
        self, step: int, attempt: int, size_bytes: int, layout: str, extra: str, ends: float, *, partial: bool = False
    ) -> Sequence[str]:
        """Bring every rank's own state to rank 0: to every node that may be lost on the way, from the first that has
        all of them."""
        if self._world_size == 1:
            return [extra]
        document = json.dumps(extra).encode()

        def tell(connection: Connection) -> None:
            begin(
                connection, step, size_bytes, connection.block_bytes, layout=layout, rank=self._rank,
                world_size=self._world_size, attempt=attempt, share=self._store.share_of(connection.address),
                partial_reservation=partial,
            )  # fmt: skip
            connection.call(Kind.EXTRA, {"step": step, "rank": self._rank}, document)

        told, failure = [], None
        for node in self._store.nodes if self._store.replicas > 1 else self._store.nodes[:1]:
            try:
                self.call(node, tell)
                told.append(node)
            except StoreUnavailable as error:
                failure = error
        if not told:
            raise failure or StoreUnavailable("no memory node")
        if self._rank != 0:
            return []
        for node in told:
            try:
                return [
                    str(text)
                    for text in self.call(node, lambda c: self._store.extras(c, step, self._world_size, _left_s(ends)))
                ]
            except StoreUnavailable as error:
                failure = error
        raise failure or StoreUnavailable("no memory node")

    # --- commit -------------------------------------------------------------------------------------------------

    def commit(
        self,
        pieces: ChunkMap,
        step: int,
        facts: Mapping[str, Any],
        down: Sequence[str],
        ends: float,
        *,
        attempt: int = 0,
        known: Sequence[int] = (),
        before_publishing: Callable[[], None] = lambda: None,
    ) -> tuple[list[int], tuple[str, ...]]:
        """Wait until every chunk has arrived, from whatever rank, and write the manifest: the chunks' digests, and the
        nodes that have no part in it. ``known`` are digests of chunks that this rank sent, 0 for those of others."""
        store = self._store
        if known and all(known) and len(store.nodes) == 1:  # it has them all, and compares when it publishes
            digests, sealed = list(known), list(store.nodes)
        else:
            digests, sealed = self._seal(pieces.count, step, down, ends)
        wrong = [chunk for chunk, digest in enumerate(known) if digest and digests[chunk] != digest]
        if wrong:
            raise Corrupt(f"chunk {wrong[0]} of step {step} is not what was sent, at the memory nodes")
        manifest = Manifest(
            run=self._run,
            step=step,
            size_bytes=pieces.layout.size_bytes,
            chunk_bytes=pieces.chunk_bytes,
            digests=digests,
            created_s=time.time(),
            world_size=self._world_size,
            nodes=store.nodes,
            replicas=store.replicas,
            facts={**facts, "save": self._save_name(attempt)},
        ).to_bytes()
        before_publishing()
        published = self._publish(step, manifest, sealed, ends)
        return digests, tuple(node for node in store.nodes if node not in published)

    def _seal(self, count: int, step: int, down: Sequence[str], ends: float) -> tuple[list[int], list[str]]:
        store = self._store
        digests: list[int | None] = [None] * count
        sealed: list[str] = []
        failure: StoreError | None = None
        for index, node in enumerate(store.nodes):
            if node in down:
                continue
            chunks = [c for c in range(count) if index in replica_nodes(c, len(store.nodes), store.replicas)]
            try:
                found = self.call(node, _sealing(step, chunks, ends))
            except (AccessDenied, Corrupt):
                raise
            except StoreError as error:  # lost, or another rank gave it up there: its replicas may do
                failure = error
                log.warning("memory node %s has no part in step %d: %s", node, step, error)
                continue
            for chunk, digest in zip(chunks, found, strict=True):
                if digests[chunk] not in (None, digest):
                    raise Corrupt(f"two memory nodes hold different bytes of chunk {chunk}")
                digests[chunk] = digest
            sealed.append(node)
        if any(digest is None for digest in digests):
            raise failure or StoreUnavailable("not every chunk has a memory node left")
        return [digest for digest in digests if digest is not None], sealed

    def _publish(self, step: int, manifest: bytes, sealed: Sequence[str], ends: float) -> set[str]:
        """The manifest to all nodes that have the chunks. Once one has it, the others are asked until they do: half a
        checkpoint would count as a node's newest, for which it lets go of a whole one."""
        store, published = self._store, set[str]()
        enough = len(store.nodes) - store.replicas + 1
        waiting = list(sealed)
        self._half[step] = published
        while True:
            failure: StoreError | None = None
            for node in list(waiting):
                index = store.nodes.index(node)
                meta = {"step": step, "node_index": index}
                try:
                    self.call(node, lambda c, meta=meta: c.call(Kind.PUBLISH, meta, manifest))  # type: ignore[misc]
                    published.add(node)
                    waiting.remove(node)
                except StoreUnavailable as error:
                    failure = error
                except StoreError as error:
                    failure = error
                    waiting.remove(node)
            if len(published) >= enough:
                del self._half[step]
                return published
            if not published or not waiting or time.monotonic() > ends:
                self.forget_halves()
                raise failure or StoreUnavailable(f"step {step} could not be committed")
            time.sleep(PUBLISH_AGAIN_S)

    def forget_halves(self) -> None:
        """Delete what was published at too few nodes, by a save that failed; raises while that cannot be done."""
        for step, nodes in list(self._half.items()):
            for node in list(nodes):
                try:
                    self.call(node, lambda c, step=step: c.call(Kind.DELETE, {"step": step}))  # type: ignore[misc]
                except StoreUnavailable:
                    if not self._store.health.is_hung(node):
                        raise
                    continue  # when it answers again
                nodes.discard(node)
            if not nodes:
                del self._half[step]

    def find_halves(self) -> None:
        """Those that an earlier session left, which ended in the middle of its commit."""
        if len(self._store.nodes) > 1:
            with suppress(StoreUnavailable):
                self._half.update(
                    {step: set(nodes) for step, nodes in self._store.uncommitted_steps(self._run).items()}
                )
                for step in self._half:
                    log.warning("step %d of run %s was never committed: it is deleted", step, self._run)
                self.forget_halves()

    def await_commit(self, step: int, attempt: int, ends: float) -> list[int]:
        """On ranks other than 0: until rank 0 has committed this very attempt."""
        wanted = self._save_name(attempt)
        while time.monotonic() < ends:
            with suppress(NotFound, StoreUnavailable):
                manifest = self._store.manifest(self._run, step)
                if manifest.facts.get("save") == wanted:
                    return list(manifest.digests)
            time.sleep(COMMIT_POLL_S)
        raise StoreUnavailable(f"step {step} was not committed within its deadline: rank 0 did not finish")

    def _save_name(self, attempt: int) -> str:
        return f"{fingerprint(self._store.session)}/{attempt}"


def _left_s(ends: float) -> float:
    return max(0.1, ends - time.monotonic())


def _sealing(step: int, chunks: Sequence[int], ends: float) -> Callable[[Connection], list[int]]:
    return lambda connection: seal(connection, step, chunks, _left_s(ends))
