"""Saving and reading: chunks in, manifest last, and everything that may go wrong between."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from deepvm.errors import AccessDenied, Corrupt, NotFound, StoreError, StoreUnavailable
from deepvm.memnode import MemoryNode
from deepvm.memnode.storage import run as run_module
from deepvm.protocol.frames import MOST_PUT, Kind, ProtocolError
from deepvm.store.base import Manifest
from tests.support.memnode.client import BLOCK, Client, chunks_of, content, digest_of, manifest_of
from tests.support.waiting import wait_until

SIZE = 3 * BLOCK + 100


def clean(node: MemoryNode) -> bool:
    """Whether nothing is in memory but what checkpoints hold."""
    held = sum(checkpoint.blocks for run in node.runs for checkpoint in run.checkpoints.values())
    return node.arena.reserved == 0 and node.arena.used == held


@pytest.fixture
def client(node: MemoryNode, connect: Callable[..., Client]) -> Client:
    return connect(node.address, "run")


def test_a_checkpoint_comes_back_byte_for_byte(node: MemoryNode, client: Client) -> None:
    data = content(1, SIZE)
    client.save(7, data)
    assert client.steps() == {7: "remote"}
    assert client.read(7) == data
    assert clean(node)
    status = client.status()
    assert status["saves"] == 1
    assert status["used_bytes"] == 4 * BLOCK
    assert status["capacity_bytes"] == 64 * BLOCK
    assert status["bytes_in"] > SIZE
    assert status["bytes_out"] > SIZE


def test_several_chunks_come_in_one_frame(node: MemoryNode, client: Client) -> None:
    data = content(1, SIZE)
    chunks = dict(enumerate(chunks_of(data)))
    client.begin(7, SIZE)
    with pytest.raises(Corrupt, match="chunk 2 "):
        client.puts(7, chunks, {2: 5})
    assert client.seal(7, [0, 1]) == [digest_of(chunks[0]), digest_of(chunks[1])]  # those before it are here to stay
    with pytest.raises(StoreError, match="2 "):
        client.seal(7, list(chunks))
    client.puts(7, {3: chunks[3], 2: chunks[2]})
    client.publish(manifest_of(data, "run", 7))
    assert client.read(7) == data
    assert clean(node)


@pytest.mark.parametrize(
    ("chunks", "told"),
    [
        ({99: bytes(BLOCK)}, "but not chunk 99"),
        ({0: bytes(BLOCK), 1: bytes(BLOCK - 1)}, "were sent"),
        ({0: bytes(BLOCK), 1: bytes(2 * BLOCK)}, "were sent"),
        ({0: bytes(BLOCK)}, "no upload"),
    ],
)
def test_chunks_that_are_refused_leave_the_connection_whole(
    node: MemoryNode, client: Client, chunks: dict[int, bytes], told: str
) -> None:
    if told != "no upload":
        client.begin(8, SIZE)
    with pytest.raises(StoreError, match=told):
        client.puts(8, chunks)
    client.save(9, content(1, SIZE))
    assert client.steps() == {9: "remote"}


@pytest.mark.parametrize("chunks", [None, [], 3, [True], ["0"], [-1], [0.0], list(range(MOST_PUT + 1))])
def test_lists_of_chunks_that_are_none_are_malformed(client: Client, chunks: object) -> None:
    client.begin(7, SIZE)
    with pytest.raises(ProtocolError, match="chunk"):
        client.ask(Kind.PUTS, {"step": 7, "chunks": chunks})


def test_nothing_is_visible_before_the_manifest(node: MemoryNode, client: Client) -> None:
    data = content(1, SIZE)
    client.begin(7, SIZE)
    for number, chunk in enumerate(chunks_of(data)):
        client.put(7, number, chunk)
    assert client.steps() == {}
    with pytest.raises(NotFound):
        client.get(7, 0)
    with pytest.raises(NotFound):
        client.manifest(7)
    client.publish(manifest_of(data, "run", 7))
    assert client.read(7) == data


def test_ranks_and_connections_share_one_upload(node: MemoryNode, connect: Callable[..., Client]) -> None:
    data = content(2, 8 * BLOCK)
    ranks = [connect(node.address, "run") for _ in range(4)]
    for rank, client in enumerate(ranks):
        client.begin(1, len(data), rank=rank, world_size=4)
        client.begin(1, len(data), rank=rank, world_size=4)
        for number in range(rank, 8, 4):
            client.put(1, number, chunks_of(data)[number])
        client.ask(Kind.EXTRA, {"step": 1, "rank": rank}, b'{"rank": %d}' % rank)
    extras = ranks[0].ask(Kind.EXTRAS, {"step": 1, "world_size": 4, "timeout_s": 1})[2]
    assert extras == b'[{"rank": 0},{"rank": 1},{"rank": 2},{"rank": 3}]'
    assert ranks[0].seal(1, range(8)) == [digest_of(chunk) for chunk in chunks_of(data)]
    ranks[0].publish(manifest_of(data, "run", 1, world_size=4))
    assert ranks[3].read(1) == data


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"layout": "other"}, r"rank 1 and rank 0 disagree on the layout \(other and l\)"),
        ({"world_size": 3}, "disagree on the world size"),
        ({"size_bytes": 5}, "disagree on the bytes"),
    ],
)
def test_the_error_of_ranks_that_disagree_names_rank_and_value(
    client: Client, fields: dict[str, Any], words: str
) -> None:
    client.begin(1, SIZE, world_size=2)
    with pytest.raises(StoreError, match=words):
        client.begin(1, SIZE, **{"rank": 1, "world_size": 2, **fields})


def test_a_damaged_chunk_is_refused_and_the_connection_continues(node: MemoryNode, client: Client) -> None:
    data = content(3, SIZE)
    client.begin(1, SIZE)
    client.put(1, 0, chunks_of(data)[0])
    with pytest.raises(Corrupt, match="chunk 1 is not what was sent"):
        client.put(1, 1, chunks_of(data)[1], digest=5)
    with pytest.raises(StoreUnavailable, match="3 of 4 chunks are missing"):
        client.seal(1, range(4), timeout_s=0.05)
    for number in (1, 2, 3):
        client.put(1, number, chunks_of(data)[number])
    client.publish(manifest_of(data, "run", 1))
    assert client.read(1) == data
    assert node.counters.corrupt_chunks == 1
    assert clean(node)


def test_a_chunk_must_have_its_place_and_length(node: MemoryNode, client: Client) -> None:
    client.begin(1, SIZE)
    for chunk, length, words in (
        (4, 100, "but not chunk 4"),
        (3, 99, "have 108 bytes"),
        (0, 5, "have 65544 bytes"),
    ):
        with pytest.raises(StoreError, match=words):
            client.put(1, chunk, bytes(length))
    with pytest.raises(NotFound, match="BEGIN comes first"):
        client.put(2, 0, bytes(BLOCK))
    client.ask(Kind.ABORT, {"step": 1})
    assert clean(node)


def test_a_repeated_chunk_replaces_the_first(node: MemoryNode, client: Client) -> None:
    data = content(4, SIZE)
    client.begin(1, SIZE)
    for _ in range(50):
        client.put(1, 0, bytes(BLOCK))
    for number, chunk in enumerate(chunks_of(data)):
        client.put(1, number, chunk)
    client.publish(manifest_of(data, "run", 1))
    assert client.read(1) == data
    assert clean(node)


def test_unchanged_chunks_are_shared_and_not_copied(node: MemoryNode, client: Client) -> None:
    first = content(5, 8 * BLOCK)
    second = first[: 6 * BLOCK] + content(6, 2 * BLOCK)
    client.save(1, first)
    before = node.counters.bytes_in
    client.begin(2, len(second))
    client.keep(2, 1, {number: digest_of(chunks_of(first)[number]) for number in range(6)})
    for number in (6, 7):
        client.put(2, number, chunks_of(second)[number])
    client.publish(manifest_of(second, "run", 2))
    assert node.counters.bytes_in - before < 3 * BLOCK
    assert node.arena.used == 10
    assert client.read(1) == first
    assert client.read(2) == second
    client.ask(Kind.DELETE, {"step": 1})
    assert node.arena.used == 8
    assert client.read(2) == second
    client.ask(Kind.DELETE, {"step": 2})
    assert node.arena.used == 0


def test_what_differs_is_not_shared(node: MemoryNode, client: Client) -> None:
    data = content(7, SIZE)
    client.save(1, data)
    client.begin(2, SIZE)
    digests = dict(enumerate(manifest_of(data, "run", 1).digests))
    with pytest.raises(NotFound, match="2 of 4 chunks are not kept of step 1"):
        client.keep(2, 1, {**digests, 2: 5, 3: 6})
    with pytest.raises(NotFound, match="1 of 1"):
        client.keep(2, 1, {99: 5})
    with pytest.raises(StoreUnavailable, match="4 of 4 chunks are missing"):
        client.seal(2, range(4))
    client.begin(3, SIZE + 1)
    with pytest.raises(NotFound, match="1 of 4"):  # the last chunk would be one byte too short
        client.keep(3, 1, digests)
    client.ask(Kind.ABORT, {"step": 3})
    assert clean(node)


def test_waiting_for_chunks_ends_when_another_rank_sends_them(node: MemoryNode, connect: Callable[..., Client]) -> None:
    data = content(8, SIZE)
    first, second = connect(node.address, "run"), connect(node.address, "run")
    first.begin(1, SIZE)
    found: list[list[int]] = []
    waiter = threading.Thread(target=lambda: found.append(first.seal(1, range(4), timeout_s=10)))
    waiter.start()
    for number, chunk in enumerate(chunks_of(data)):
        second.put(1, number, chunk)
    waiter.join(5)
    assert found == [list(manifest_of(data, "run", 1).digests)]


def test_missing_ranks_are_counted(client: Client) -> None:
    client.begin(1, SIZE, world_size=3)
    client.ask(Kind.EXTRA, {"step": 1, "rank": 0}, b"{}")
    with pytest.raises(StoreUnavailable, match="the states of 2 of 3 ranks are missing"):
        client.ask(Kind.EXTRAS, {"step": 1, "world_size": 3, "timeout_s": 0.05})
    with pytest.raises(StoreError, match="rank 3 is out of range for world_size 3"):
        client.ask(Kind.EXTRA, {"step": 1, "rank": 3}, b"{}")
    with pytest.raises(StoreError, match="cannot be taken"):
        client.ask(Kind.EXTRA, {"step": 1, "rank": 1}, b"{")


def test_a_manifest_that_does_not_fit_publishes_nothing(node: MemoryNode, client: Client) -> None:
    data = content(9, SIZE)
    client.begin(1, SIZE)
    for number, chunk in enumerate(chunks_of(data)[:3]):
        client.put(1, number, chunk)
    good = manifest_of(data, "run", 1)
    with pytest.raises(StoreError, match="1 chunks are missing, first 3"):
        client.publish(good)
    client.put(1, 3, bytes(100))
    with pytest.raises(Corrupt, match="1 chunks are not what the manifest lists, first 3"):
        client.publish(good)
    with pytest.raises(StoreError, match="the manifest is of run 'other', step 1"):
        client.publish(manifest_of(data, "other", 1))
    with pytest.raises(StoreError, match="the manifest has"):
        client.publish(manifest_of(data + b"x", "run", 1))
    with pytest.raises(StoreError, match="cannot be read"):
        client.ask(Kind.PUBLISH, {"step": 1}, b"{}")
    with pytest.raises(StoreError, match="node 3 of 1"):
        client.publish(good, node_index=3)
    assert client.steps() == {}
    client.put(1, 3, chunks_of(data)[3])
    client.publish(good)
    client.publish(good)  # the first answer may have been lost
    assert client.read(1) == data


def test_the_newest_buffers_checkpoints_are_kept(start_node: Callable[..., MemoryNode], connect: Any) -> None:
    node = start_node(buffers=3)
    client = connect(node.address, "run")
    for step in range(5):
        client.save(step, content(step, SIZE))
        assert list(client.steps()) == list(range(5))[max(0, step - 2) : step + 1]
    client.begin(5, SIZE)  # with the one in progress there are three
    assert list(client.steps()) == [3, 4]
    assert client.read(4) == content(4, SIZE)


def test_one_buffer_keeps_the_old_until_the_new_is_whole(start_node: Callable[..., MemoryNode], connect: Any) -> None:
    client = connect(start_node(buffers=1).address, "run")
    client.save(1, content(1, SIZE))
    client.begin(2, SIZE)
    assert list(client.steps()) == [1]
    client.save(2, content(2, SIZE))
    assert list(client.steps()) == [2]


def test_a_step_saved_again_stays_whole_until_it_is_replaced(node: MemoryNode, client: Client) -> None:
    client.save(1, content(1, SIZE))
    client.begin(1, SIZE)
    client.put(1, 0, bytes(BLOCK))
    assert client.read(1) == content(1, SIZE)
    client.save(1, content(2, SIZE))
    assert client.read(1) == content(2, SIZE)
    assert clean(node)


def test_after_a_roll_back_the_newest_commit_stays(client: Client) -> None:
    for step in (100, 200, 110):
        client.save(step, content(step, SIZE))
    assert list(client.steps()) == [110, 200]
    client.begin(120, SIZE)
    assert list(client.steps()) == [110]


def test_no_room_is_reported_before_a_byte_is_sent(node: MemoryNode, client: Client) -> None:
    client.save(1, content(1, 40 * BLOCK))
    with pytest.raises(StoreUnavailable, match=r"needs 1\.97 MB, 1\.57 MB of 4\.19 MB are free"):
        client.begin(2, 30 * BLOCK)
    client.save(3, content(3, 24 * BLOCK))
    assert list(client.steps()) == [1, 3]
    with pytest.raises(StoreUnavailable, match="needs"):
        client.begin(4, 65 * BLOCK)
    assert list(client.steps()) == [3]
    assert clean(node)


def test_ranks_that_begin_together_reserve_room_once(start_node: Any, connect: Callable[..., Client]) -> None:
    node = start_node(capacity_bytes=8 * BLOCK)
    ranks = [connect(node.address, "run") for _ in range(6)]
    for step in (1, 2):
        threads = [
            threading.Thread(target=client.begin, args=(step, 8 * BLOCK), kwargs={"rank": rank, "world_size": 6})
            for rank, client in enumerate(ranks)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert (node.arena.reserved, node.arena.used) == (8, 0)
        assert [len(run.uploads) for run in node.runs] == [1]


def test_a_newer_session_fences_the_older_one_off(node: MemoryNode, connect: Callable[..., Client]) -> None:
    old, new = connect(node.address, "run", session="old"), connect(node.address, "run", session="new", write=False)
    old.save(1, content(1, SIZE))
    old.begin(2, SIZE)
    old.put(2, 0, bytes(BLOCK))
    new.open_run("run", session="new")
    assert clean(node)  # what the old session left unfinished is gone
    attempts: list[Callable[[], object]] = [
        lambda: old.begin(3, SIZE),
        lambda: old.put(2, 1, bytes(BLOCK)),
        lambda: old.keep(2, 1, {}),
        lambda: old.ask(Kind.EXTRA, {"step": 2, "rank": 0}, b"{}"),
        lambda: old.seal(2, [0]),
        lambda: old.publish(manifest_of(content(1, SIZE), "run", 2)),
        lambda: old.ask(Kind.ABORT, {"step": 2}),
        lambda: old.ask(Kind.DELETE, {"step": 1}),
        lambda: connect(node.address, "run", session="old"),
    ]
    for attempt in attempts:
        with pytest.raises(AccessDenied, match="newer session"):
            attempt()
    assert old.read(1) == content(1, SIZE)  # reading is not writing
    new.save(2, content(2, SIZE))
    assert new.read(2) == content(2, SIZE)


def test_a_chunk_on_its_way_when_the_session_ends_is_thrown_away(node: MemoryNode, connect: Any) -> None:
    old = connect(node.address, "run", session="old")
    old.begin(1, SIZE)
    data = bytes(BLOCK)
    from deepvm.protocol import frames

    frame = frames.encode(Kind.PUTS, 9, {"step": 1, "chunks": [0]}, len(data) + frames.DIGEST.size, 0)
    frame += data + frames.DIGEST.pack(digest_of(data))
    old.send(frame[:-10])
    wait_until(lambda: any(upload.receiving for run in node.runs for upload in run.uploads.values()))
    connect(node.address, "run", session="new")
    assert node.arena.used == 1  # still being received into
    old.send(frame[-10:])
    kind, meta, _ = old.answer()
    assert (kind, meta["code"]) == (Kind.ERROR, "fenced")
    assert clean(node)


def test_a_later_upload_takes_an_unfinished_one_s_place(node: MemoryNode, client: Client) -> None:
    client.begin(1, SIZE)
    client.put(1, 0, bytes(BLOCK))
    client.begin(2, SIZE)
    with pytest.raises(StoreError, match="step 1 was not finished before step 2 began"):
        client.put(1, 1, bytes(BLOCK))
    with pytest.raises(StoreError, match="step 1 was not finished before step 2 began"):
        client.begin(1, SIZE)
    client.save(2, content(2, SIZE))
    client.save(1, content(1, SIZE))
    assert list(client.steps()) == [1, 2]


def test_an_upload_that_nobody_touches_gives_its_memory_back(start_node: Any, connect: Any) -> None:
    node = start_node(limits={"upload_idle_s": 0.1})
    client = connect(node.address, "run")
    client.begin(1, SIZE)
    client.put(1, 0, bytes(BLOCK))
    wait_until(lambda: node.arena.used == 0 and node.arena.reserved == 0, timeout_s=5)
    with pytest.raises(NotFound):
        client.put(1, 1, bytes(BLOCK))


def test_a_share_of_the_chunks_needs_room_for_that_share_only(node: MemoryNode, client: Client) -> None:
    data = content(1, 10 * BLOCK)
    client.begin(1, len(data), nodes=3, node_index=1, replicas=2)
    assert node.arena.reserved == 7
    mine = [chunk for chunk in range(10) if 1 in (chunk % 3, (chunk + 1) % 3)]
    for chunk in mine:
        client.put(1, chunk, chunks_of(data)[chunk])
    manifest = manifest_of(data, "run", 1, nodes=("a:1", "b:1", "c:1"), replicas=2)
    with pytest.raises(StoreError, match="chunks are missing"):
        client.publish(manifest, node_index=0)
    client.publish(manifest, node_index=1)
    assert client.get(1, mine[0]) == chunks_of(data)[mine[0]]
    with pytest.raises(NotFound, match="has no chunk 2 here"):
        client.get(1, 2)


def test_requests_out_of_order_or_of_wrong_types_are_refused(node: MemoryNode, connect: Any) -> None:
    with pytest.raises(StoreError, match="OPEN comes first"):
        connect(node.address).ask(Kind.STEPS)
    for kind, meta, words in (
        (Kind.BEGIN, {"step": True, "size_bytes": 5, "layout": "", "rank": 0, "world_size": 1}, "step is True, not an"),
        (Kind.BEGIN, {"step": 1.0, "size_bytes": 5, "layout": "", "rank": 0, "world_size": 1}, "step is 1.0, not an"),
        (Kind.BEGIN, {"step": 1, "size_bytes": 0, "layout": "", "rank": 0, "world_size": 1}, "size_bytes is 0, not"),
        (Kind.BEGIN, {"step": 1, "size_bytes": 5, "layout": 4, "rank": 0, "world_size": 1}, "layout is 4, not"),
        (Kind.BEGIN, {"step": 1, "size_bytes": 5, "layout": "", "rank": 1, "world_size": 1}, "rank is 1, not an"),
        (Kind.GET, {"step": 1, "chunk": -1}, "chunk is -1, not"),
        (Kind.SEAL, {"step": 1, "timeout_s": -1}, "timeout_s is -1, not a number"),
        (Kind.SEAL, {"step": 1, "timeout_s": 10**400}, "an integer of more than 64 bits"),
        (Kind.OPEN, {"run": "../x", "session": "s", "write": True, "verifier": "00" * 32}, "not a valid run name"),
        (Kind.OPEN, {"run": "x", "session": "s", "write": 1}, "write is 1, neither true nor false"),
        (Kind.OPEN, {"run": "x", "session": "s", "write": True, "verifier": "zz"}, "hexadecimal"),
        (Kind.HELLO, {}, "a client does not send HELLO"),
    ):
        client = connect(node.address, "run")
        client.save(1, content(1, SIZE)) if kind is Kind.GET else None
        client.begin(1, SIZE) if kind is Kind.SEAL else None
        with pytest.raises(ProtocolError, match=words):
            client.ask(kind, meta)
        with pytest.raises(StoreError):  # and the connection is closed
            client.status()


def test_a_reader_cannot_write(node: MemoryNode, connect: Callable[..., Client]) -> None:
    connect(node.address, "run").save(1, content(1, SIZE))
    reader = connect(node.address, "run", write=False)
    assert reader.read(1) == content(1, SIZE)
    with pytest.raises(AccessDenied, match="open it with write=true"):
        reader.begin(2, SIZE)
    reader.ask(Kind.DELETE, {"step": 1})  # with the key, without taking the run from its trainer
    assert reader.steps() == {}


def test_a_block_is_not_reused_while_it_is_being_sent(node: MemoryNode, connect: Callable[..., Client]) -> None:
    writer, reader = connect(node.address, "run"), connect(node.address, "run", write=False)
    data = content(1, 30 * BLOCK)
    writer.save(1, data)
    from deepvm.protocol import frames

    for chunk in range(30):  # asked for, and not taken off the wire
        reader.send(frames.encode(Kind.GET, chunk, {"step": 1, "chunk": chunk}))
    wait_until(reader.answered, "the first answer")
    for step in (2, 3, 4):
        writer.save(step, content(step, 16 * BLOCK))
    for chunk in range(30):
        kind, meta, body = reader.answer()
        assert body == chunks_of(data)[chunk] if kind is Kind.DATA else meta["code"] == "not-found"
    wait_until(lambda: clean(node))


def test_golden_bytes_of_a_published_document_stay_as_they_are(client: Client) -> None:
    data = content(1, SIZE)
    client.save(1, data)
    document = client.ask(Kind.MANIFEST, {"step": 1})[2]
    assert document == manifest_of(data, "run", 1).to_bytes()
    assert isinstance(Manifest.from_bytes(document), Manifest)


def test_a_connection_that_begins_after_the_commit_evicts_nothing(node: MemoryNode, connect: Any) -> None:
    client, late = connect(node.address, "run"), connect(node.address, "run")
    client.save(1, content(1, SIZE))
    client.begin(2, SIZE, attempt=5)
    client.save_chunks(2, content(2, SIZE))
    client.publish(manifest_of(content(2, SIZE), "run", 2))
    late.begin(2, SIZE, attempt=5)
    assert list(client.steps()) == [1, 2]
    with pytest.raises(NotFound, match="BEGIN comes first"):
        late.put(2, 0, content(2, SIZE)[:BLOCK])
    late.begin(2, SIZE, attempt=6)  # a later attempt is another save
    late.save_chunks(2, content(3, SIZE))
    late.publish(manifest_of(content(3, SIZE), "run", 2))
    assert client.read(2) == content(3, SIZE)


def test_a_later_attempt_begins_from_nothing_and_the_earlier_one_goes_nowhere(node: MemoryNode, connect: Any) -> None:
    data = content(1, SIZE)
    first, second = connect(node.address, "run"), connect(node.address, "run")
    first.begin(1, SIZE)
    first.put(1, 0, bytes(BLOCK))
    second.begin(1, SIZE, attempt=1)
    assert (node.arena.used, node.arena.reserved) == (0, 4)
    with pytest.raises(NotFound, match="step 1 began anew"):
        first.put(1, 1, bytes(BLOCK))
    with pytest.raises(StoreError, match="disagree on the attempt"):
        first.begin(1, SIZE)
    second.save_chunks(1, data)
    second.publish(manifest_of(data, "run", 1))
    assert first.read(1) == data
    assert clean(node)


def test_a_repair_waits_for_saves_and_takes_its_old_place(node: MemoryNode, client: Client) -> None:
    for step in (2, 3):
        client.save(step, content(step, SIZE))
    client.ask(Kind.DELETE, {"step": 2})
    client.begin(4, SIZE)
    with pytest.raises(StoreUnavailable, match="step 4 is being saved: step 2 is repaired later"):
        client.begin(2, SIZE, repair=True)
    client.ask(Kind.ABORT, {"step": 4})
    client.begin(2, SIZE, repair=True)
    client.save_chunks(2, content(2, SIZE))
    client.publish(manifest_of(content(2, SIZE), "run", 2))
    client.begin(5, SIZE)
    assert list(client.steps()) == [3]  # the repaired one is the older of the two


def test_of_many_steps_the_newest_600_are_listed(node: MemoryNode, client: Client) -> None:
    client.save(1, content(1, SIZE))
    run = node.runs.find("run")
    assert run is not None
    for step in range(2, 652):
        run.checkpoints[step] = run.checkpoints[1]
    assert list(client.steps()) == list(range(52, 652))
    for step in range(2, 652):
        del run.checkpoints[step]
    assert list(client.steps()) == [1]


class Elsewhere:
    """A copy that fails when it is read."""

    whole = True

    def __init__(self, problem: Exception) -> None:
        self._problem = problem

    def has(self, chunk: int) -> bool:
        return True

    def read(self, chunk: int, into: memoryview) -> None:
        raise self._problem


def test_what_is_not_in_memory_is_neither_mended_nor_served_if_its_copy_fails(
    start_node: Callable[..., MemoryNode], connect: Callable[..., Client]
) -> None:
    node = start_node(capacity_bytes=5 * BLOCK)
    data = content(1, 2 * BLOCK)
    client = connect(node.address, "run")
    client.save(1, data)
    run = node.runs.find("run")
    assert run is not None
    checkpoint = run.checkpoints[1]
    taken = [node.arena.take(reserved=False) for _ in range(3)]
    with pytest.raises(StoreUnavailable, match="no block is free: try again"):
        client.ask(Kind.MEND, {"step": 1, "chunk": 1}, data[BLOCK:])
    for block in taken:
        node.arena.drop(block)
    checkpoint.evict()
    with pytest.raises(NotFound, match="chunk 1 of step 1 is not in memory here"):
        client.ask(Kind.MEND, {"step": 1, "chunk": 1}, data[BLOCK:])
    with pytest.raises(NotFound, match="step 1 has no chunk 1 here"):
        client.get(1, 1)
    block = node.arena.take(reserved=False)
    with pytest.raises(NotFound, match="step 1 has no chunk 1 here"):
        checkpoint.read(1, block)
    assert checkpoint.mend(1, block) is False
    node.arena.drop(block)
    for problem, shown in ((NotFound("gone"), NotFound), (Corrupt("bad"), Corrupt), (StoreError("odd"), StoreError)):
        checkpoint.copy = Elsewhere(problem)
        with pytest.raises(shown, match=f"^{problem}$") as raised:
            client.get(1, 1)
        assert raised.type is shown
    checkpoint.copy = None
    assert node.arena.used == 0


def test_a_damaged_chunk_is_mended_with_its_own_bytes_only(node: MemoryNode, connect: Callable[..., Client]) -> None:
    data = content(1, SIZE)
    connect(node.address, "run").save(1, data)
    run = node.runs.find("run")
    assert run is not None
    block = run.checkpoints[1].hold(2)
    assert block is not None
    node.arena.view(block, 1)[0] ^= 1
    node.arena.drop(block)
    client = connect(node.address, "run", write=False)
    with pytest.raises(Corrupt):
        client.get(1, 2)
    with pytest.raises(Corrupt, match="not chunk 2 of step 1"):
        client.ask(Kind.MEND, {"step": 1, "chunk": 2}, bytes(BLOCK))
    with pytest.raises(StoreError, match="no chunk 2 of 5 bytes"):
        client.ask(Kind.MEND, {"step": 1, "chunk": 2}, bytes(5))
    client.ask(Kind.MEND, {"step": 1, "chunk": 2}, chunks_of(data)[2])
    assert client.read(1) == data
    assert clean(node)


def test_who_begins_beside_another_waits_and_is_refused_in_the_end(
    node: MemoryNode, connect: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect(node.address, "run")
    run = node.runs.find("run")
    assert run is not None
    monkeypatch.setattr(run_module, "_BEGIN_S", 0.0)
    with run._beginning, pytest.raises(StoreUnavailable, match="others have been beginning an upload of run 'run'"):
        client.begin(1, SIZE)
    client.begin(1, SIZE)
    client.ask(Kind.ABORT, {"step": 1})
    assert clean(node)


def test_a_session_that_is_over_while_it_reserves_room_gets_none(
    node: MemoryNode, connect: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect(node.address, "run", session="s1")
    run = node.runs.find("run")
    assert run is not None
    reserve = run._reserve

    def overtaken(*words: Any) -> int:
        reserved = reserve(*words)
        run.claim("s2")
        return reserved

    monkeypatch.setattr(run, "_reserve", overtaken)
    with pytest.raises(AccessDenied, match="a newer session writes run 'run' now; session 's1' is over"):
        client.begin(1, SIZE)
    assert (node.arena.reserved, run.uploads) == (0, {})
