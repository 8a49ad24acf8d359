"""What memory nodes answer is checked before it is used: each answer that a good node cannot give is a StoreError."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from deepvm.errors import Corrupt, NotFound, StoreError, StoreUnavailable, UsageError
from deepvm.memnode import MemoryNode
from deepvm.protocol import frames
from deepvm.store.base import MOST_STEP
from deepvm.store.memory import answers, upload
from deepvm.store.memory.store import MemoryStore
from tests.store.memory.test_hostile_nodes import document, hostile_node, ok
from tests.support.memnode.client import BLOCK, content, manifest_of
from tests.support.store.checkpoints import payload, read, save


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"runs": {}},
        {"runs": ["../up"]},
        {"runs": [7]},
    ],
)
def test_names_of_runs_are_checked(answer: dict[str, Any]) -> None:
    with pytest.raises(StoreError, match="the answer of memory node n:1 cannot be read"):
        answers.run_names(answer, "n:1")
    assert answers.run_names({"runs": ["a", "b"]}, "n:1") == ["a", "b"]


@pytest.mark.parametrize(
    "rows",
    [
        {},
        [1],
        [{"step": -1, "state": "remote"}],
        [{"step": MOST_STEP + 1, "state": "remote"}],
        [{"step": True, "state": "remote"}],
        [{"step": 1}],
        [{"step": 1, "state": "x" * 101}],
        [{"state": "remote"}],
    ],
)
def test_rows_of_steps_are_checked(rows: Any) -> None:
    with pytest.raises(StoreError, match="the answer of memory node n:1 cannot be read"):
        answers.step_rows({"steps": rows}, "n:1")


def test_rows_of_steps_within_the_limits_are_taken() -> None:
    rows = [{"step": 0, "state": ""}, {"step": MOST_STEP, "state": "x" * 100}]
    assert answers.step_rows({"steps": rows}, "n:1") == rows


@pytest.mark.parametrize("version", [None, -1, "1", MOST_STEP + 1])
def test_a_lists_version_is_checked(version: Any) -> None:
    with pytest.raises(StoreError, match="the answer of memory node n:1 cannot be read"):
        answers.list_version({"version": version}, "n:1")
    assert [answers.list_version({"version": good}, "n:1") for good in (0, MOST_STEP)] == [0, MOST_STEP]


def test_ranks_states_are_at_most_one_for_each_rank_and_no_deeper_than_states_are() -> None:
    assert answers.rank_states(b'[1, {"a": []}]', 2, "n:1") == [1, {"a": []}]
    deepest = b"[" * 501 + b"]" * 501
    assert answers.rank_states(deepest, 1, "n:1")
    for body, world_size in ((b"{}", 0), (b"[1, 2, 3]", 2), (b"[1,", 1), (b"[" + deepest + b"]", 1)):
        with pytest.raises(Corrupt, match="the ranks' own states on memory node n:1 cannot be read"):
            answers.rank_states(body, world_size, "n:1")


def test_chunks_that_were_not_offered_and_seals_of_other_chunks_are_refused() -> None:
    others = document(frames.pack("I", [7]))
    digests = document(frames.pack("Q", [5]))
    with hostile_node(OFFER=others, LINK=others, SEAL=digests) as address, closing(MemoryStore([address])) as store:
        connection = store.connect(address, "run", write=True)
        with closing(connection):
            for ask in (
                lambda: upload.offer(connection, 1, [0, 1], [3, 4]),
                lambda: upload.link(connection, 1, [0, 1], [3, 4], [b"", b""]),
            ):
                with pytest.raises(Corrupt, match="chunks that were not offered"):
                    ask()
            assert upload.offer(connection, 1, [6, 7], [3, 4]) == [7]
            with pytest.raises(Corrupt, match="sealed 1 chunks instead of 2"):
                upload.seal(connection, 1, [0, 1], 0.0)
            assert upload.seal(connection, 1, [0], 0.0) == [5]
            with pytest.raises(Corrupt, match="holds other bytes than were sent"):
                upload.seal_share(connection, manifest_of(content(1, BLOCK), "run", 1), 0, 0.0)


def test_a_chunk_of_another_length_is_refused_and_ends_the_connection() -> None:
    manifest = manifest_of(content(1, BLOCK), "run", 1)
    with hostile_node(GET=document(b"short")) as address, closing(MemoryStore([address])) as store:
        connection = store.connect(address, "run")
        with closing(connection):
            with pytest.raises(Corrupt, match=f"answers with 5 bytes instead of {BLOCK}"):
                connection.read_chunk(manifest, 0, memoryview(bytearray(BLOCK)))
            assert connection.broken
        with pytest.raises(Corrupt, match="instead of"):
            store.read_chunk(manifest, 0, memoryview(bytearray(BLOCK)))


def test_a_damaged_document_is_refused() -> None:
    def damaged(request: int) -> Iterator[bytes]:
        yield frames.encode(frames.Kind.DATA, request, None, 3, 1) + b"abc"

    with (
        hostile_node(MANIFEST=damaged) as address,
        closing(MemoryStore([address])) as store,
        pytest.raises(Corrupt, match="arrived damaged"),
    ):
        store.manifest("run", 1)


def test_an_answer_to_another_request_is_refused() -> None:
    def later(request: int) -> Iterator[bytes]:
        yield frames.encode(frames.Kind.OK, request + 1, {"runs": []})

    with (
        hostile_node(RUNS=later) as address,
        closing(MemoryStore([address])) as store,
        pytest.raises(frames.ProtocolError, match="does not belong to the next request"),
    ):
        store.runs()


@pytest.mark.parametrize("kind", ["ERROR", "PUTS"])
def test_a_refusal_without_a_reason_and_a_kind_that_is_no_answer(kind: str) -> None:
    def answer(request: int) -> Iterator[bytes]:
        yield frames.encode(frames.Kind[kind], request, {"code": "busy"})

    with (
        hostile_node(RUNS=answer) as address,
        closing(MemoryStore([address])) as store,
        pytest.raises(StoreError),
    ):
        store.runs()


# --- what a store refuses by itself ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"nodes": []}, "needs at least one node"),
        ({"nodes": ["h"]}, "h"),
        ({"nodes": ["h:1"], "replicas": 0}, "replicas is 0: it must be from 1 to the number of memory nodes, 1"),
        ({"nodes": ["h:1"], "replicas": 2}, "replicas is 2"),
        ({"nodes": ["h:1"], "connections": 0}, "connections is 0: it must be from 1 to 64"),
        ({"nodes": ["h:1"], "connections": 65}, "connections is 65"),
    ],
)
def test_a_store_that_cannot_work_is_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        MemoryStore(**options)


def test_the_largest_figures_are_taken() -> None:
    store = MemoryStore(["h:1", "h:2"], replicas=2, connections=64, pace_bytes_per_s=2**31 - 1)
    assert (store.replicas, store.connections, store.parallel_reads) == (2, 64, 128)
    assert MemoryStore(["h:1"], connections=1, pace_bytes_per_s=1).parallel_reads == 1
    assert (MemoryStore(["h:1"]).replicas, MemoryStore(["h:1"]).connections) == (1, 2)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("memory://h:1?replicas=two", "replicas, connections and pace are whole numbers"),
        ("memory://h:1?pace=", "replicas, connections and pace are whole numbers"),
        ("memory://h:1?replica=2", "unknown option 'replica'"),
        ("memory://h:1/run", "unknown path '/run'"),
        ("memory://h:1?tls=", "tls= is empty"),
    ],
)
def test_a_url_that_says_something_else_is_refused(url: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        MemoryStore.from_url(url)


def test_a_url_passes_every_option_on() -> None:
    store = MemoryStore.from_url("memory://h:1,h:2/?replicas=2&connections=3&pace=1000")
    assert (store.nodes, store.replicas, store.connections) == (("h:1", "h:2"), 2, 3)
    assert store.url == "memory://h:1,h:2?replicas=2"
    assert MemoryStore.from_url("memory://h:1").url == "memory://h:1"


def test_chunks_of_another_size_than_the_nodes_blocks_are_refused_and_nothing_is_left(
    start_node: Callable[..., MemoryNode],
) -> None:
    node = start_node()
    with closing(MemoryStore([node.address])) as store:
        with pytest.raises(UsageError, match=f"has blocks of {BLOCK} bytes, not of {2 * BLOCK}"):
            store.writer("run", 1, size_bytes=BLOCK, chunk_bytes=2 * BLOCK)
        data = payload(BLOCK + 1)
        manifest = manifest_of(data, "run", 1)
        writer = store.writer("run", 1, size_bytes=len(data), chunk_bytes=BLOCK)
        for chunk, (start, length) in enumerate(((0, BLOCK), (BLOCK, 1))):
            writer.put(chunk, [memoryview(data)[start : start + length]], manifest.digests[chunk])
        writer.publish(manifest)
        assert read(store, "run") == data
        with pytest.raises(StoreError, match="step 1 was aborted or published before"):
            writer.publish(manifest)
    (run,) = node.runs
    assert not run.uploads


def test_a_connection_that_may_not_open_a_run_is_closed(start_node: Callable[..., MemoryNode]) -> None:
    node = start_node()
    with closing(MemoryStore([node.address])) as store:
        save(store, payload(10), chunk_bytes=BLOCK)
        before = node.connections
        with closing(MemoryStore([node.address], key="another")) as other:
            with pytest.raises(StoreError):
                other.steps("run-a")
            ends = time.monotonic() + 10
            while node.connections > before and time.monotonic() < ends:
                time.sleep(0.005)
            assert node.connections == before


def test_a_chunk_that_no_node_has_is_not_found(start_node: Callable[..., MemoryNode]) -> None:
    node = start_node()
    data = payload(2 * BLOCK)
    with closing(MemoryStore([node.address])) as store:
        manifest = save(store, data, chunk_bytes=BLOCK)
        store.delete("run-a", 1)
        with pytest.raises(NotFound):
            store.read_chunk(manifest, 0, memoryview(bytearray(BLOCK)))
    with closing(MemoryStore(["127.0.0.1:1"])) as store, pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:1"):
        store.runs()
    assert ok({})(1)
