"""Copies of a checkpoint that a memory node missed, made again from the other nodes."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from deepvm.errors import NotFound, StoreUnavailable
from deepvm.protocol.frames import Kind
from deepvm.protocol.placement import Share
from deepvm.store.base import Manifest
from deepvm.store.memory.connection import Connection
from deepvm.store.memory.upload import begin, seal_as_listed

if TYPE_CHECKING:
    from deepvm.store.memory.store import MemoryStore

log = logging.getLogger("deepvm.store")


def repair(store: MemoryStore, run: str, step: int, attempt: int = 0) -> list[str]:
    """Make the missing copies of a checkpoint again, on nodes that answer and do not have it; the nodes that have
    it now. Only for the session that writes the run, and refused while it saves: unless by an attempt that is
    known to be over, which are all up to ``attempt``."""
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
            continue  # still away
        connection = store.connect(node, run, write=True)
        try:
            _copy_share(store, connection, index, manifest, document, attempt)
        finally:
            connection.close()
        whole.append(node)
        log.warning("made the copy of step %d of run %s at %s again", step, run, node)
    return whole


def _copy_share(
    store: MemoryStore, connection: Connection, index: int, manifest: Manifest, document: bytes, attempt: int
) -> None:
    nodes, step = manifest.nodes, manifest.step
    share = {"nodes": len(nodes), "node_index": index, "replicas": manifest.replicas}
    begin(
        connection, step, manifest.size_bytes, manifest.chunk_bytes,
        layout="", rank=0, world_size=1, share=share, attempt=attempt, repair=True,
    )  # fmt: skip
    mine = Share(nodes=len(nodes), index=index, replicas=manifest.replicas).chunks(len(manifest.digests))
    buffer = memoryview(bytearray(min(manifest.chunk_bytes, manifest.size_bytes)))
    for chunk in mine:
        data = buffer[: manifest.span(chunk)[1]]
        store.read_chunk(manifest, chunk, data)
        connection.put(step, chunk, data, manifest.digests[chunk])
        connection.finish()  # before the buffer is filled again
    seal_as_listed(connection, manifest, mine, 0.0)
    connection.call(Kind.PUBLISH, {"step": step, "node_index": index}, document)
