"""Upload a checkpoint to memory nodes, request by request: begin at each, seal at all, publish last."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from deepvm.errors import Corrupt, StoreError, UsageError
from deepvm.protocol import frames
from deepvm.protocol.frames import Kind
from deepvm.protocol.placement import Share, replica_nodes
from deepvm.store.base import Manifest
from deepvm.store.chunks import UploadCheck, as_bytes
from deepvm.store.memory.connection import Connection

if TYPE_CHECKING:
    from deepvm.store.memory.store import MemoryStore

SEAL_S = 60.0  # for a node to have all its chunks


def begin(
    connection: Connection,
    step: int,
    size_bytes: int,
    chunk_bytes: int,
    *,
    layout: str = "",
    rank: int = 0,
    world_size: int = 1,
    attempt: int = 0,
    share: Share | None = None,
    repair: bool = False,
    partial_reservation: bool = False,
) -> None:
    """Begin or join the upload of a step at one node.

    ``share`` is this node's part of the chunks. ``partial_reservation``: the node has many of the chunks already, so
    the save may begin without room for all of them.
    """
    if chunk_bytes != connection.block_bytes:
        raise UsageError(
            f"memory node {connection.address} has blocks of {connection.block_bytes} bytes, not of {chunk_bytes}"
        )
    meta = {"step": step, "size_bytes": size_bytes, "layout": layout, "rank": rank, "world_size": world_size}
    options = {"attempt": attempt, "repair": repair, "lean": partial_reservation}
    if share is not None:
        options |= {"nodes": share.nodes, "node_index": share.index, "replicas": share.replicas}
    connection.call(Kind.BEGIN, {**meta, **options})


def pack_kept(chunks: Sequence[int], digests: Sequence[int]) -> bytes:
    """Pack the body of KEEP and OFFER: chunk indices, then their digests."""
    return frames.pack("I", chunks) + frames.pack("Q", digests)


def offer(connection: Connection, step: int, chunks: Sequence[int], digests: Sequence[int]) -> list[int]:
    """Return the chunks that a node may have already, by their digests."""
    _, found = connection.call(Kind.OFFER, {"step": step}, pack_kept(chunks, digests))
    return _check_offered(connection, chunks, found)


def link(
    connection: Connection, step: int, chunks: Sequence[int], digests: Sequence[int], proofs: Sequence[bytes]
) -> list[int]:
    """Share the chunks that a node has already, if the proofs of their content fit; return those that it shares."""
    _, found = connection.call(Kind.LINK, {"step": step}, pack_kept(chunks, digests) + b"".join(proofs))
    return _check_offered(connection, chunks, found)


def _check_offered(connection: Connection, chunks: Sequence[int], answer: bytearray) -> list[int]:
    found = list(frames.unpack("I", answer))
    if not set(found) <= set(chunks):
        raise Corrupt(f"memory node {connection.address} answered with chunks that were not offered")
    return found


def seal(connection: Connection, step: int, chunks: Sequence[int], timeout_s: float) -> list[int]:
    """Wait until a node has these chunks, from any rank; return their digests."""
    meta = {"step": step, "timeout_s": timeout_s}
    _, answer = connection.call(Kind.SEAL, meta, frames.pack("I", chunks), timeout_s=timeout_s)
    digests = list(frames.unpack("Q", answer))
    if len(digests) != len(chunks):
        raise Corrupt(f"memory node {connection.address} sealed {len(digests)} chunks instead of {len(chunks)}")
    return digests


def seal_share(connection: Connection, manifest: Manifest, index: int, timeout_s: float) -> None:
    """Wait until the node of this index has its chunks; Corrupt if their digests are not those of the manifest."""
    chunks = manifest.share(index).chunks(len(manifest.digests))
    if seal(connection, manifest.step, chunks, timeout_s) != [manifest.digests[chunk] for chunk in chunks]:
        raise Corrupt(f"memory node {connection.address} holds other bytes than were sent")


def publish_share(connection: Connection, step: int, index: int, document: bytes) -> None:
    """Publish a manifest at the node of this index: from then on its part of the checkpoint exists."""
    connection.call(Kind.PUBLISH, {"step": step, "node_index": index}, document)


class MemoryWriter:
    """Write one checkpoint to memory nodes, for tools and tests; trainers use checkpoint/save/memory_transfer.py."""

    def __init__(self, store: MemoryStore, run: str, step: int, *, size_bytes: int, chunk_bytes: int) -> None:
        self._store, self._step = store, step
        self._uploaded = UploadCheck(run, step, size_bytes, chunk_bytes)
        self._lock = threading.Lock()
        self._connections: list[Connection] = []

    def begin(self) -> MemoryWriter:
        """Connect to every node, and begin the upload there."""
        uploaded = self._uploaded
        try:
            for node in self._store.nodes:
                connection = self._store.connect(node, uploaded.run, write=True)
                self._connections.append(connection)
                share = self._store.share_of(node)
                begin(connection, self._step, uploaded.size_bytes, uploaded.chunk_bytes, share=share)
        except BaseException:
            self.abort()
            raise
        return self

    def put(self, chunk: int, pieces: Sequence[memoryview], digest: int) -> None:
        store = self._store
        data = as_bytes(pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces)))
        self._uploaded.span(chunk, len(data))
        for node in replica_nodes(chunk, len(store.nodes), store.replicas):
            with self._lock:
                self._connections[node].put(self._step, chunk, data, digest)
        self._uploaded.put(chunk, digest)

    def publish(self, manifest: Manifest) -> None:
        """Wait until each node has its chunks, as the manifest lists them; then, last, publish the manifest at all."""
        self._uploaded.check(manifest)
        manifest = replace(manifest, nodes=self._store.nodes, replicas=self._store.replicas)
        with self._lock:
            if not self._connections:
                raise StoreError(f"step {self._step} was aborted or published before")
            for index, connection in enumerate(self._connections):
                connection.finish()
                seal_share(connection, manifest, index, SEAL_S)
            for index, connection in enumerate(self._connections):
                publish_share(connection, manifest.step, index, manifest.to_bytes())
        self._close()

    def abort(self) -> None:
        for connection in self._connections:
            with suppress(StoreError):
                connection.finish()
                connection.call(Kind.ABORT, {"step": self._step})
        self._close()

    def _close(self) -> None:
        for connection in self._connections:
            connection.close()
        self._connections = []
