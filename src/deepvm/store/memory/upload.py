"""Upload a checkpoint to memory nodes, request by request: begin at each, seal at all, publish last."""

from __future__ import annotations

import struct
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from deepvm.errors import Corrupt, StoreError, UsageError
from deepvm.protocol.frames import Kind
from deepvm.protocol.placement import Share, replica_nodes
from deepvm.store.base import Manifest
from deepvm.store.chunks import UploadCheck
from deepvm.store.memory.connection import Connection

if TYPE_CHECKING:
    from deepvm.store.memory.store import MemoryStore


def begin(
    connection: Connection,
    step: int,
    size_bytes: int,
    chunk_bytes: int,
    *,
    layout: str,
    rank: int,
    world_size: int,
    attempt: int = 0,
    share: Mapping[str, int] | None = None,
    repair: bool = False,
    partial_reservation: bool = False,
) -> None:
    """Begin or join the upload of a step at one node.

    ``share`` has nodes, node_index and replicas, if several nodes share the chunks. ``partial_reservation``: the node
    has many of the chunks already, so the save may begin without room for all of them.
    """
    if chunk_bytes != connection.block_bytes:
        raise UsageError(
            f"memory node {connection.address} has blocks of {connection.block_bytes} bytes, not of {chunk_bytes}"
        )
    meta = {"step": step, "size_bytes": size_bytes, "layout": layout, "rank": rank, "world_size": world_size}
    options = {"attempt": attempt, "repair": repair, "lean": partial_reservation}
    connection.call(Kind.BEGIN, {**meta, **(share or {}), **options})


def pack_kept(chunks: Sequence[int], digests: Sequence[int]) -> bytes:
    """Pack the body of KEEP: chunk indices, then their digests, little-endian."""
    return struct.pack(f"<{len(chunks)}I{len(digests)}Q", *chunks, *digests)


def offer(connection: Connection, step: int, chunks: Sequence[int], digests: Sequence[int]) -> list[int]:
    """Return the chunks that a node may have already, by their digests."""
    _, found = connection.call(Kind.OFFER, {"step": step}, pack_kept(chunks, digests))
    return _of_those(connection, chunks, found)


def link(
    connection: Connection, step: int, chunks: Sequence[int], digests: Sequence[int], proofs: Sequence[bytes]
) -> list[int]:
    """Share the chunks that a node has already, if the proofs of their content fit; return those that it shares."""
    _, found = connection.call(Kind.LINK, {"step": step}, pack_kept(chunks, digests) + b"".join(proofs))
    return _of_those(connection, chunks, found)


def _of_those(connection: Connection, chunks: Sequence[int], answer: bytes | bytearray) -> list[int]:
    found = [chunk for (chunk,) in struct.iter_unpack("<I", answer[: len(answer) & -4])]
    if len(answer) % 4 or not set(found) <= set(chunks):
        raise Corrupt(f"memory node {connection.address} answered with chunks that were not offered")
    return found


def seal(connection: Connection, step: int, chunks: Sequence[int], timeout_s: float) -> list[int]:
    """Wait until a node has these chunks, from any rank; return their digests."""
    body = struct.pack(f"<{len(chunks)}I", *chunks)
    _, digests = connection.call(Kind.SEAL, {"step": step, "timeout_s": timeout_s}, body, timeout_s=timeout_s)
    if len(digests) != 8 * len(chunks):
        raise Corrupt(f"memory node {connection.address} sealed {len(digests) // 8} chunks instead of {len(chunks)}")
    return list(struct.unpack(f"<{len(chunks)}Q", digests))


def seal_as_listed(connection: Connection, manifest: Manifest, chunks: Sequence[int], timeout_s: float) -> None:
    """Wait until a node has these chunks; Corrupt if their digests are not those of the manifest."""
    if seal(connection, manifest.step, chunks, timeout_s) != [manifest.digests[chunk] for chunk in chunks]:
        raise Corrupt(f"memory node {connection.address} holds other bytes than were sent")


def seal_and_publish(connections: Sequence[Connection], manifest: Manifest, timeout_s: float = 60.0) -> None:
    """Wait until each node has its chunks, as the manifest lists them; then, last, publish the manifest at all."""
    for index, connection in enumerate(connections):
        share = Share(nodes=len(connections), index=index, replicas=manifest.replicas)
        seal_as_listed(connection, manifest, share.chunks(len(manifest.digests)), timeout_s)
    for index, connection in enumerate(connections):
        connection.call(Kind.PUBLISH, {"step": manifest.step, "node_index": index}, manifest.to_bytes())


class MemoryWriter:
    """Write one checkpoint to memory nodes, for tools and tests; trainers use checkpoint/save/memory_transfer.py."""

    def __init__(self, store: MemoryStore, run: str, step: int, *, size_bytes: int, chunk_bytes: int) -> None:
        self._store, self._step = store, step
        self._tally = UploadCheck(run, step, size_bytes, chunk_bytes)
        self._lock = threading.Lock()
        self._connections: list[Connection] = []
        try:
            for node in store.nodes:
                connection = store.connect(node, run, write=True)
                self._connections.append(connection)
                begin(
                    connection,
                    step,
                    size_bytes,
                    chunk_bytes,
                    layout="",
                    rank=0,
                    world_size=1,
                    share=store.share_of(node),
                )
        except BaseException:
            self.abort()
            raise

    def put(self, chunk: int, pieces: Sequence[memoryview], digest: int) -> None:
        store = self._store
        data = memoryview(pieces[0]) if len(pieces) == 1 else memoryview(b"".join(pieces))
        data = data.cast("B")
        self._tally.span(chunk, len(data))
        for home in replica_nodes(chunk, len(store.nodes), store.replicas):
            with self._lock:
                self._connections[home].put(self._step, chunk, data, digest)
        self._tally.took(chunk, digest)

    def publish(self, manifest: Manifest) -> None:
        store = self._store
        self._tally.check(manifest)
        with self._lock:
            if not self._connections:
                raise StoreError(f"step {self._step} was aborted or published before")
            for connection in self._connections:
                connection.finish()
            seal_and_publish(
                self._connections,
                Manifest(
                    run=manifest.run,
                    step=manifest.step,
                    size_bytes=manifest.size_bytes,
                    chunk_bytes=manifest.chunk_bytes,
                    digests=manifest.digests,
                    created_s=manifest.created_s,
                    world_size=manifest.world_size,
                    nodes=store.nodes,
                    replicas=store.replicas,
                    facts=manifest.facts,
                ),
            )
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
