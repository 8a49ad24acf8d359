"""Several memory nodes of which one does not answer: what the others have is used, and the silence is not hidden."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from deepvm.errors import StoreUnavailable
from deepvm.memnode import MemoryNode
from deepvm.store.memory.store import MemoryStore
from tests.support.store.checkpoints import CHUNK, payload, read, save

Start = Callable[..., MemoryNode]


@pytest.fixture
def nodes(start_node: Start) -> list[MemoryNode]:
    return [start_node() for _ in range(3)]


@pytest.fixture
def store(nodes: list[MemoryNode]) -> Iterator[MemoryStore]:
    with closing(MemoryStore([node.address for node in nodes], replicas=2)) as found:
        yield found


def test_a_delete_that_does_not_reach_one_node_is_reported_and_done_at_the_others(
    store: MemoryStore, nodes: list[MemoryNode]
) -> None:
    save(store, payload(6 * CHUNK))
    nodes[0].stop()
    with pytest.raises(StoreUnavailable, match=nodes[0].address):
        store.delete("run-a", 1)
    assert [len(run.checkpoints) for node in nodes[1:] for run in node.runs] == [0, 0]


def test_a_delete_of_a_step_that_no_node_has_is_nothing(store: MemoryStore) -> None:
    save(store, payload(CHUNK))
    store.delete("run-a", 7)
    assert store.steps("run-a") == [1]


def test_no_step_is_called_half_committed_while_a_node_may_have_the_other_half(
    store: MemoryStore, nodes: list[MemoryNode]
) -> None:
    save(store, payload(6 * CHUNK))
    for node in nodes[1:]:
        (run,) = node.runs
        run.delete(1, None)
    assert store.uncommitted_steps("run-a") == {1: [nodes[0].address]}
    nodes[1].stop()
    assert store.uncommitted_steps("run-a") == {}


def test_a_newer_step_that_is_not_whole_while_a_node_is_silent_is_logged(
    store: MemoryStore, nodes: list[MemoryNode], caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        save(store, payload(6 * CHUNK), step=step)
    (run,) = nodes[1].runs
    run.delete(2, None)
    nodes[0].stop()
    with caplog.at_level(logging.WARNING, "deepvm.store"):
        assert store.steps("run-a") == [1]
    assert "step 2 of run run-a" in caplog.text
    assert read(store, step=1) == payload(6 * CHUNK)


def test_silence_of_all_is_not_an_empty_run(store: MemoryStore, nodes: list[MemoryNode]) -> None:
    save(store, payload(CHUNK))
    for node in nodes:
        node.stop()
    for ask in (lambda: store.runs(), lambda: store.steps("run-a"), lambda: store.manifest("run-a", 1)):
        with pytest.raises(StoreUnavailable):
            ask()


def test_a_node_that_has_nothing_does_not_speak_for_one_that_is_silent(nodes: list[MemoryNode]) -> None:
    empty, silent, _ = nodes
    silent.stop()
    with (
        closing(MemoryStore([empty.address, silent.address], replicas=2)) as store,
        pytest.raises(StoreUnavailable, match=silent.address),
    ):
        store.steps("run-a")


def test_a_damaged_copy_that_cannot_be_replaced_is_logged_and_the_good_one_is_read(
    store: MemoryStore, nodes: list[MemoryNode], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = payload(6 * CHUNK)
    manifest = save(store, data)
    first = next(node for node in nodes if node.address == manifest.nodes[0])
    (run,) = first.runs
    with run.checkpoints[1].chunk(0) as view:
        view[0] ^= 1
    monkeypatch.setattr(type(run.checkpoints[1]), "mend", lambda *_: False)
    assert read(store) == data
    assert "chunk 0 of step 1 of run run-a" in caplog.text
    assert "cannot be replaced" in caplog.text
