"""The repair of nodes that missed a checkpoint: what they get, who is asked, and when it must wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from deepvm.errors import StoreUnavailable
from deepvm.memnode import MemoryNode
from deepvm.store.memory.repair import repair
from deepvm.store.memory.store import MemoryStore
from deepvm.store.memory.upload import begin
from tests.support.memnode.client import BLOCK
from tests.support.store.checkpoints import payload, read, save

DATA = payload(6 * BLOCK + 100)


@pytest.fixture
def nodes(start_node: Callable[..., MemoryNode]) -> list[MemoryNode]:
    return [start_node() for _ in range(3)]


@pytest.fixture
def store(nodes: list[MemoryNode]) -> Iterator[MemoryStore]:
    with closing(MemoryStore([node.address for node in nodes], replicas=2)) as found:
        save(found, DATA, chunk_bytes=BLOCK)
        yield found


def forget(node: MemoryNode) -> None:
    (run,) = node.runs
    run.delete(1, None)


def test_every_node_that_lost_its_share_gets_it_again(store: MemoryStore, nodes: list[MemoryNode]) -> None:
    forget(nodes[1])
    assert repair(store, "run-a", 1) == [node.address for node in nodes]
    nodes[2].stop()
    with closing(MemoryStore(store.nodes, replicas=2)) as other:
        assert read(other) == DATA


def test_a_silent_node_is_left_out_and_those_after_it_are_repaired(nodes: list[MemoryNode]) -> None:
    addresses = [node.address for node in nodes]
    with closing(MemoryStore(addresses, replicas=3)) as store:
        save(store, DATA, chunk_bytes=BLOCK)
        forget(nodes[2])
        nodes[0].stop()
        assert repair(store, "run-a", 1) == addresses[1:]
        nodes[1].stop()
        assert read(store) == DATA


def test_nothing_is_sent_to_nodes_that_are_whole(store: MemoryStore, nodes: list[MemoryNode]) -> None:
    saved = [node.counters.saves for node in nodes]
    assert repair(store, "run-a", 1) == [node.address for node in nodes]
    assert [node.counters.saves for node in nodes] == saved


def test_a_repair_waits_for_a_save_and_ends_those_of_abandoned_attempts(
    store: MemoryStore, nodes: list[MemoryNode]
) -> None:
    forget(nodes[1])
    connection = store.connect(nodes[1].address, "run-a", write=True)
    begin(connection, 2, len(DATA), BLOCK, attempt=1, share=store.share_of(nodes[1].address))
    with pytest.raises(StoreUnavailable, match="step 2 is being saved: step 1 is repaired later"):
        repair(store, "run-a", 1)
    assert repair(store, "run-a", 1, attempt=1) == [node.address for node in nodes]
    connection.close()
