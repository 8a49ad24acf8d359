"""What is deleted in a node is removed from its durable store, before the answer, and what is saved later stays."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from deepvm.errors import StoreUnavailable
from deepvm.protocol.frames import Kind
from deepvm.store.files.store import FileStore
from tests.support.memnode.client import BLOCK, Client, content, digest_of, manifest_of
from tests.support.waiting import wait_until

SIZE = 3 * BLOCK + 100


class SwitchedStore(FileStore):
    """A store whose writes wait, or whose deletions fail, while the test says so."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.go, self.refuses = threading.Event(), False
        self.go.set()

    def writer(self, *words: Any, **fields: Any) -> Any:
        assert self.go.wait(20)
        return super().writer(*words, **fields)

    def delete(self, run: str, step: int) -> None:
        if self.refuses:
            raise StoreUnavailable("the bucket refuses")
        super().delete(run, step)


@pytest.fixture
def durable(tmp_path: Path) -> SwitchedStore:
    return SwitchedStore(tmp_path)


@pytest.fixture
def client(start_node: Any, connect: Any, durable: SwitchedStore) -> Client:
    found = connect(start_node(durable=durable, buffers=4).address, "run")
    assert isinstance(found, Client)
    return found


def save(client: Client, step: int, data: bytes, *, at_s: float = 1.0) -> None:
    client.begin(step, len(data))
    client.save_chunks(step, data)
    client.publish(manifest_of(data, "run", step, created_s=at_s))


def settled(client: Client) -> bool:
    return not client.status()["durable_waiting"]


def first_digest(store: FileStore, step: int) -> int:
    return store.manifest("run", step).digests[0]


@pytest.mark.parametrize("later_s", [2.0, 0.5], ids=["later", "with a clock that was set back"])
def test_a_step_saved_again_after_its_deletion_stays_durable(
    client: Client, durable: SwitchedStore, later_s: float
) -> None:
    old, new = content(1, SIZE), content(9, SIZE)
    save(client, 1, old)
    wait_until(lambda: settled(client))
    durable.go.clear()
    save(client, 5, content(5, SIZE))  # the worker is busy with it
    client.ask(Kind.DELETE, {"step": 1})
    assert FileStore.steps(durable, "run") == []
    save(client, 1, new, at_s=later_s)
    durable.go.set()
    wait_until(lambda: client.steps().get(1) == "durable" and settled(client))
    assert first_digest(durable, 1) == digest_of(new[:BLOCK])


@pytest.mark.parametrize("later_s", [2.0, 0.5], ids=["later", "with a clock that was set back"])
def test_a_removal_that_failed_does_not_remove_what_was_saved_after_it(
    client: Client, durable: SwitchedStore, later_s: float
) -> None:
    old, new = content(1, SIZE), content(9, SIZE)
    save(client, 1, old)
    wait_until(lambda: settled(client))
    durable.refuses = True
    with pytest.raises(StoreUnavailable, match="the bucket refuses"):
        client.ask(Kind.DELETE, {"step": 1})
    save(client, 1, new, at_s=later_s)
    wait_until(lambda: client.steps().get(1) == "durable")
    durable.refuses = False
    wait_until(lambda: settled(client))
    assert first_digest(durable, 1) == digest_of(new[:BLOCK])


@pytest.mark.parametrize("later_s", [2.0, 0.5], ids=["later", "with a clock that was set back"])
def test_a_step_saved_again_and_deleted_before_it_is_written_leaves_no_older_copy(
    client: Client, durable: SwitchedStore, later_s: float
) -> None:
    save(client, 1, content(1, SIZE))
    wait_until(lambda: settled(client))
    durable.go.clear()
    save(client, 1, content(9, SIZE), at_s=later_s)  # waits to be written
    client.ask(Kind.DELETE, {"step": 1})
    assert FileStore.steps(durable, "run") == []
    durable.go.set()
    wait_until(lambda: settled(client))
    assert FileStore.steps(durable, "run") == []


def test_a_deletion_is_answered_with_ok_only_once_the_durable_store_has_nothing_left(
    client: Client, durable: SwitchedStore
) -> None:
    for step in (1, 2):
        save(client, step, content(step, SIZE))
        wait_until(lambda: settled(client))
    durable.refuses = True
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="not in its durable store"):
            client.ask(Kind.DELETE, {"step": 2})
    assert client.steps() == {1: "durable"}
    durable.refuses = False
    client.ask(Kind.DELETE, {"step": 2})
    assert durable.steps("run") == [1]


def test_two_trainings_of_one_name_do_not_overwrite_each_other(
    client: Client, durable: SwitchedStore, start_node: Any, connect: Any
) -> None:
    save(client, 1, content(1, SIZE))
    wait_until(lambda: settled(client))
    other = connect(start_node(durable=FileStore(durable.root)).address, "run", key="another key")
    for step in (1, 2):
        save(other, step, content(9, SIZE), at_s=5.0)
    wait_until(lambda: "another training's" in str(other.status()["durable_error"]))
    assert other.steps() == {1: "remote", 2: "remote"}
    other.ask(Kind.DELETE, {"step": 1})
    assert durable.steps("run") == [1]
    assert first_digest(durable, 1) == digest_of(content(1, SIZE)[:BLOCK])


def test_a_training_continues_on_another_node_with_its_key(
    client: Client, durable: SwitchedStore, start_node: Any, connect: Any
) -> None:
    save(client, 1, content(1, SIZE))
    wait_until(lambda: settled(client))
    again = connect(start_node(durable=FileStore(durable.root)).address, "run", session="s2")
    save(again, 2, content(2, SIZE))
    wait_until(lambda: again.steps() == {2: "durable"})
    assert durable.steps("run") == [1, 2]


def test_a_removal_that_failed_is_done_by_the_node(client: Client, durable: SwitchedStore) -> None:
    save(client, 1, content(1, SIZE))
    wait_until(lambda: settled(client))
    durable.refuses = True
    with pytest.raises(StoreUnavailable):
        client.ask(Kind.DELETE, {"step": 1})
    assert not settled(client)
    durable.refuses = False
    wait_until(lambda: settled(client))
    assert durable.steps("run") == []


def test_a_checkpoint_deleted_while_it_is_written_does_not_come_back(client: Client, durable: SwitchedStore) -> None:
    durable.go.clear()
    save(client, 1, content(1, SIZE))
    client.ask(Kind.DELETE, {"step": 1})
    durable.go.set()
    wait_until(lambda: settled(client))
    assert durable.steps("run") == []
