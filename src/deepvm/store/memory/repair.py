"""Write the replicas that a memory node missed: read from the other nodes, written to it. checkpoint/save calls it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from deepvm.errors import NotFound, StoreUnavailable
from deepvm.protocol.frames import Kind
from deepvm.store.base import Manifest
from deepvm.store.memory.connection import Connection
from deepvm.store.memory.upload import begin, publish_share, seal_share

if TYPE_CHECKING:
    from deepvm.store.memory.store import MemoryStore

log = logging.getLogger("deepvm.store")


def repair(store: MemoryStore, run: str, step: int, attempt: int = 0) -> list[str]:
    """Write the missing replicas of a checkpoint to nodes that answer and do not have it; return the nodes that do now.

    Only the session that writes the run may repair. It is refused during a save, except one of an attempt up to
    ``attempt``: those are known to be over.
    """
    manifest, document = store.newest_manifest(run, step)
    whole = []
    for index, node in enumerate(manifest.nodes):
        try:
            if bytes(store.call(node, run, Kind.MANIFEST, {"step": step})[1]) == document:
                whole.append(node)
                continue
        except NotFound:
            pass
        except StoreUnavailable:
            continue  # still unreachable
        connection = store.connect(node, run, write=True)
        try:
            _copy_share(store, connection, index, manifest, document, attempt)
        finally:
            connection.close()
        whole.append(node)
        log.warning("repaired step %d of run %s at %s", step, run, node)
    return whole


def _copy_share(
    store: MemoryStore, connection: Connection, index: int, manifest: Manifest, document: bytes, attempt: int
) -> None:
    step, share = manifest.step, manifest.share(index)
    begin(connection, step, manifest.size_bytes, manifest.chunk_bytes, share=share, attempt=attempt, repair=True)
    buffer = memoryview(bytearray(min(manifest.chunk_bytes, manifest.size_bytes)))
    for chunk in share.chunks(len(manifest.digests)):
        data = buffer[: manifest.span(chunk)[1]]
        store.read_chunk(manifest, chunk, data)
        connection.put(step, chunk, data, manifest.digests[chunk])
        connection.finish()  # before the buffer is filled again
    seal_share(connection, manifest, index, timeout_s=0.0)
    publish_share(connection, step, index, document)
