"""What a save asks of memory nodes when they disagree, are lost, or keep what was never committed: with real nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from deepvm.checkpoint.save.commit import CommitClient
from deepvm.checkpoint.save.sender_threads import Upload
from deepvm.errors import CheckpointError, Corrupt, StoreUnavailable
from deepvm.memnode import MemoryNode
from deepvm.protocol.frames import Kind
from deepvm.store.memory.store import MemoryStore
from deepvm.store.memory.upload import publish_share
from tests.support.memnode.client import BLOCK, chunks_of, content, digest_of, manifest_of

DATA = content(3, 2 * BLOCK)
Start = Callable[..., MemoryNode]


@pytest.fixture
def nodes(start_node: Start) -> list[MemoryNode]:
    return [start_node() for _ in range(2)]


class Rank:
    """One rank's commit client, and the store that it works on."""

    def __init__(self, nodes: list[MemoryNode], *, rank: int = 0, world_size: int = 1, replicas: int = 1) -> None:
        self.store = MemoryStore([node.address for node in nodes], session="trainer", replicas=replicas)
        self.client = CommitClient(self.store, "run", rank, world_size)

    def upload(self, step: int) -> Upload:
        source: Any = None  # the chunks are sent here, and not by senders
        found = Upload(
            source=source, step=step, size_bytes=len(DATA), chunk_bytes=BLOCK, layout="", base=None, attempt=1
        )
        found.digests = [digest_of(chunk) for chunk in chunks_of(DATA)]
        return found

    def send(self, step: int, *, wrong_at: int | None = None) -> Upload:
        """Bring both chunks to every node that keeps them; one node may get other bytes for them."""
        upload = self.upload(step)
        for index, node in enumerate(self.store.nodes):
            connection = self.store.connect(node, "run", write=True)
            upload.begin(connection, self.store, 0, 1)
            data = chunks_of(content(9, 2 * BLOCK) if index == wrong_at else DATA)
            for chunk in self.store.share_of(node).chunks(2):
                connection.put(step, chunk, memoryview(data[chunk]), digest_of(data[chunk]))
            connection.finish()
            connection.close()
        return upload

    def half_commit(self, step: int) -> None:
        """What a trainer leaves that ends between its two manifests."""
        self.send(step)
        manifest = manifest_of(DATA, "run", step, nodes=self.store.nodes)
        connection = self.store.connect(self.store.nodes[0], "run", write=True)
        publish_share(connection, step, 0, manifest.to_bytes())
        connection.close()


@pytest.fixture
def rank_of() -> Iterator[Callable[..., Rank]]:
    made: list[Rank] = []

    def make(nodes: list[MemoryNode], **options: Any) -> Rank:
        made.append(Rank(nodes, **options))
        return made[-1]

    yield make
    for one in made:
        one.client.close()
        one.store.close()


RankOf = Callable[..., Rank]


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def steps(node: MemoryNode) -> list[int]:
    return sorted(step for run in node.runs for step in run.checkpoints)


def test_blocks_of_different_sizes_are_refused_and_of_one_size_told(start_node: Start, rank_of: RankOf) -> None:
    large = start_node(block_bytes=2 * BLOCK, capacity_bytes=64 * BLOCK)
    with pytest.raises(CheckpointError, match="the memory nodes keep blocks of different sizes"):
        rank_of([start_node(), large]).client.connect()
    assert rank_of([large]).client.connect() == 2 * BLOCK


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_commit_is_at_all_nodes_and_the_newest(nodes: list[MemoryNode], rank_of: RankOf, replicas: int) -> None:
    rank = rank_of(nodes, replicas=replicas)
    rank.client.connect()
    assert rank.client.newest() is None
    digests, missing = rank.client.commit(rank.send(4), {"a": 1}, (), soon())
    assert (digests, missing) == ([digest_of(chunk) for chunk in chunks_of(DATA)], ())
    found = rank.client.newest()
    assert found is not None
    assert (found.step, found.replicas, found.world_size, found.facts["a"]) == (4, replicas, 1, 1)
    assert [steps(node) for node in nodes] == [[4], [4]]
    assert rank_of(nodes[:1]).client.newest() is None, "not connected yet"
    alone = rank_of(nodes[:1]).client
    alone.connect()
    assert alone.newest() is None, "shared by other nodes"


def test_nodes_with_different_bytes_of_a_chunk_are_corrupt(nodes: list[MemoryNode], rank_of: RankOf) -> None:
    rank = rank_of(nodes, replicas=2)
    with pytest.raises(Corrupt, match="two memory nodes hold different bytes of chunk 0"):
        rank.client.commit(rank.send(1, wrong_at=1), {}, (), soon())
    other = rank_of(nodes)
    with pytest.raises(Corrupt, match="the memory nodes hold other bytes of chunk 1 of step 2 than were sent"):
        other.client.commit(other.send(2, wrong_at=1), {}, (), soon())
    assert [steps(node) for node in nodes] == [[], []]


def test_a_node_that_is_down_is_not_asked_and_named_as_missing(nodes: list[MemoryNode], rank_of: RankOf) -> None:
    rank = rank_of(nodes, replicas=2)
    upload = rank.send(1)
    assert rank.client.commit(upload, {}, (nodes[1].address,), soon())[1] == (nodes[1].address,)
    assert [steps(node) for node in nodes] == [[1], []]


def test_without_a_node_for_every_chunk_nothing_is_committed(nodes: list[MemoryNode], rank_of: RankOf) -> None:
    rank = rank_of(nodes)
    upload = rank.send(1)
    with pytest.raises(StoreUnavailable, match="not every chunk has a memory node left"):
        rank.client.commit(upload, {}, (nodes[1].address,), soon())
    rank = rank_of(nodes)
    upload = rank.send(2)
    nodes[1].stop(now=True)
    with pytest.raises(StoreUnavailable, match=nodes[1].address):
        rank.client.commit(upload, {}, (), soon())
    assert steps(nodes[0]) == []


def test_leftovers_of_a_commit_are_deleted_once(
    nodes: list[MemoryNode], rank_of: RankOf, caplog: pytest.LogCaptureFixture
) -> None:
    rank = rank_of(nodes)
    rank.half_commit(3)
    assert [steps(node) for node in nodes] == [[3], []]
    rank.client.delete_leftovers()
    assert [steps(node) for node in nodes] == [[], []]
    assert "step 3 of run run was never committed: deleting it" in caplog.text
    nodes[0].stop(now=True)
    rank.client.delete_uncommitted()  # nothing is left to ask for


def test_what_cannot_be_deleted_yet_is_deleted_later(nodes: list[MemoryNode], rank_of: RankOf) -> None:
    rank = rank_of(nodes)
    rank.half_commit(3)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rank.client, "call", lambda *_: (_ for _ in ()).throw(StoreUnavailable("silent")))
        rank.client.delete_leftovers()
        with pytest.raises(StoreUnavailable, match="silent"):
            rank.client.delete_uncommitted()
        assert steps(nodes[0]) == [3]
        patched.setattr(rank.store.health, "is_hung", lambda node: True)
        rank.client.delete_uncommitted()  # it hangs: others are not kept waiting
    rank.client.delete_uncommitted()
    assert steps(nodes[0]) == []


def test_a_single_node_has_no_leftovers(nodes: list[MemoryNode], rank_of: RankOf) -> None:
    rank_of(nodes).half_commit(3)
    rank_of(nodes[:1]).client.delete_leftovers()
    assert steps(nodes[0]) == [3]


def test_other_ranks_wait_for_the_commit_of_their_very_attempt(nodes: list[MemoryNode], rank_of: RankOf) -> None:
    first, second = rank_of(nodes), rank_of(nodes, rank=1, world_size=2).client
    digests, _ = first.client.commit(first.send(1), {}, (), soon())
    assert second.await_commit(1, 1, soon()) == digests
    began = time.monotonic()
    with pytest.raises(StoreUnavailable, match="step 1 was not committed within its deadline: rank 0 did not finish"):
        second.await_commit(1, 2, soon(0.2))
    assert time.monotonic() - began >= 0.19


def test_values_that_do_not_arrive_in_time_fail_the_save(nodes: list[MemoryNode], rank_of: RankOf) -> None:
    rank = rank_of(nodes, world_size=2, replicas=2)
    rank.client.connect()
    with pytest.raises(StoreUnavailable):
        rank.client.exchange(rank.upload(1), "mine", time.monotonic())
    other = rank_of(nodes, rank=1, world_size=2, replicas=2)
    assert other.client.exchange(rank.upload(1), "another's", soon()) == []
    assert rank.client.exchange(rank.upload(1), "mine", soon()) == ["mine", "another's"]


def test_a_lost_connection_is_dropped_and_a_node_that_hangs_is_dialled_anew(
    nodes: list[MemoryNode], rank_of: RankOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = rank_of(nodes, replicas=2)
    rank.client.connect()
    same: Callable[[Any], Any] = lambda connection: connection  # noqa: E731
    first, second = (rank.client.call(node.address, same) for node in nodes)
    assert rank.client.call(nodes[0].address, same) is first
    monkeypatch.setattr(rank.store.health, "is_hung", lambda node: node == nodes[0].address)
    third = rank.client.call(nodes[0].address, same)
    assert third is not first
    rank.client.abort(9)
    assert rank.client.call(nodes[1].address, same) is second, "a refusal leaves the connection"
    second.interrupt()
    rank.client.abort(9)
    assert rank.client.call(nodes[1].address, same) is not second


def test_all_nodes_lost_is_the_reason_of_the_last(nodes: list[MemoryNode], rank_of: RankOf) -> None:
    rank = rank_of(nodes)
    for node in nodes:
        node.stop(now=True)
    with pytest.raises(StoreUnavailable, match=nodes[1].address):
        rank.client.connect()


def test_a_connection_that_broke_while_idle_is_made_again_once(start_node: Start, rank_of: RankOf) -> None:
    node = start_node()
    rank = rank_of([node])
    assert rank.client.connect() == BLOCK
    asked: list[Any] = []

    def question(connection: Any) -> int:
        asked.append(connection)
        connection.call(Kind.STEPS)
        return 7

    assert rank.client.call(node.address, question) == 7
    asked.pop().interrupt()
    assert rank.client.call(node.address, question) == 7
    assert len(asked) == 2
    rank.client.abort(9)
    rank.client.abort(9, attempt=1)


def test_a_lone_rank_exchanges_with_itself_alone(nodes: list[MemoryNode], rank_of: RankOf) -> None:
    rank = rank_of(nodes)
    assert rank.client.exchange(rank.upload(1), "mine", soon()) == ["mine"]
