"""A node whose bytes come in drops is slow, and not dead."""

from __future__ import annotations

from collections.abc import Callable

import torch

from deepvm.checkpoint import Checkpointer
from deepvm.memnode import MemoryNode
from deepvm.store.memory.connection import Connection
from deepvm.store.memory.store import MemoryStore
from tests.support.fetcher import MIB, PATIENCE_S
from tests.support.relay import Relay

PROGRESS_S = 0.2


def test_a_chunk_that_comes_more_slowly_than_readers_are_woken_is_waited_for(
    node_of: Callable[..., MemoryNode], run: str
) -> None:
    node = node_of(block_bytes=MIB // 2)
    saved = {"ramp": torch.arange(MIB // 2, dtype=torch.float32)}
    with Checkpointer(saved, f"memory://{node.address}", run=run, on_error="raise") as ckpt:
        ckpt.save(1).wait("remote", PATIENCE_S)
    store = MemoryStore([node.address])
    manifest = store.manifest(run, 1)
    store.close()
    with Relay(node.address) as relay:
        connection = Connection.connect(relay.address, progress_s=PROGRESS_S)
        connection.open(run)
        relay.pause_s = PROGRESS_S / 2  # after 64 KiB: a quarter of what wakes a reader, in two thirds of its patience
        into = memoryview(bytearray(manifest.span(1)[1]))
        connection.read_chunk(manifest, 1, into)
        relay.pause_s = 0.0
        connection.read_chunk(manifest, 0, into)
        assert not connection.broken
        connection.close()
