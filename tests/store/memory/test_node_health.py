"""A node that hangs is known to all who use a store; one that is slow, or that nothing can replace, is waited for."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest

from deepvm.errors import StoreUnavailable
from deepvm.memnode import Limits, MemoryNode
from deepvm.protocol.frames import Kind
from deepvm.store.memory.store import MemoryStore
from deepvm.store.memory.upload import begin

BLOCK = 64 * 2**10


@contextmanager
def a_node() -> Iterator[MemoryNode]:
    node = MemoryNode(capacity_bytes=16 * BLOCK, block_bytes=BLOCK, limits=Limits(stop_s=0.0, flush_s=0.0))
    with node:
        yield node


@contextmanager
def silent_node() -> Iterator[str]:
    """Its system accepts connections, and nobody answers them: as of a process that is stopped."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_a_node_that_waits_for_other_ranks_is_not_taken_for_hung() -> None:
    with (
        a_node() as first,
        a_node() as second,
        closing(MemoryStore([first.address, second.address], replicas=2)) as store,
    ):
        connection = store.connect(first.address, "run", write=True)
        share = store.share_of(first.address)
        begin(connection, 1, BLOCK, BLOCK, layout="", rank=0, world_size=2, share=share)
        meta = {"step": 1, "world_size": 2, "timeout_s": 2.0}
        with pytest.raises(StoreUnavailable, match="states of 2 of 2 ranks are missing"):
            connection.call(Kind.EXTRAS, meta, timeout_s=2.0)
        assert not store.health.is_hung(first.address)
        connection.close()


def test_a_node_that_hangs_is_not_asked_again_until_it_answers() -> None:
    with ExitStack() as stack:
        address = stack.enter_context(silent_node())
        node = stack.enter_context(a_node())
        store = stack.enter_context(closing(MemoryStore([node.address, address], replicas=2)))
        assert store.runs() == []
        assert store.health.is_hung(address)
        began = time.monotonic()
        for _ in range(20):
            with pytest.raises(StoreUnavailable, match="did not answer in time"):
                store.connect(address, "run", write=True)
        assert time.monotonic() - began < 1
        assert "deepvm-health" in {thread.name for thread in threading.enumerate()}
        store.health._greet = lambda _: None  # it greets again
        deadline = time.monotonic() + 10
        while store.health.is_hung(address):
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_a_node_that_nothing_can_replace_is_waited_for() -> None:
    with silent_node() as one, silent_node() as other, closing(MemoryStore([one, other], replicas=2)) as store:
        with pytest.raises(StoreUnavailable):
            store.connect(one, "run")
        assert store.health.is_hung(one)
        assert not store.health.can_spare(other)
        store.health.stalled(other)  # raises nothing: its wait goes on to its own deadline
        assert not store.health.is_hung(other)


def test_a_closed_store_asks_no_node_any_more() -> None:
    with silent_node() as address, a_node() as node:
        store = MemoryStore([node.address, address], replicas=2)
        store.runs()
        store.close()
        assert "deepvm-health" not in {thread.name for thread in threading.enumerate()}
