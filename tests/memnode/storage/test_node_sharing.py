"""Chunks that several checkpoints have in common, of one run or many: kept once, shared with none who lacks them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from deepvm.errors import NotFound, StoreError, StoreUnavailable
from deepvm.memnode import MemoryNode
from deepvm.memnode.storage.dedup import MOST_FALSE, MOST_OFFERED
from deepvm.protocol import frames
from deepvm.protocol.frames import Kind
from tests.support.memnode.client import BLOCK, Client, NodeProcess, chunks_of, content, digest_of, manifest_of
from tests.support.waiting import wait_until

Start = Callable[..., MemoryNode]
Connect = Callable[..., Client]


def many(*seeds: int) -> bytes:
    """One block of each seed."""
    return b"".join(content(seed, BLOCK) for seed in seeds)


BASE = many(*range(10, 18))


def used(node: MemoryNode) -> int:
    return node.arena.used


def test_a_second_run_from_the_same_base_sends_and_keeps_only_what_differs(node: MemoryNode, connect: Connect) -> None:
    first, second = connect(node.address, "first"), connect(node.address, "second", key="another key")
    first.save(1, BASE + many(1, 2))
    before = node.counters.bytes_in
    assert second.save_what_is_new(1, BASE + many(3, 4)) == [8, 9]
    wait_until(lambda: node.counters.bytes_in - before > 2 * BLOCK)
    assert node.counters.bytes_in - before < 3 * BLOCK
    assert (used(node), node.arena.reserved) == (12, 0)
    assert node.counters.linked_chunks == 8
    assert first.read(1) == BASE + many(1, 2)
    assert second.read(1) == BASE + many(3, 4)


def test_what_is_shared_outlives_the_run_that_brought_it(node: MemoryNode, connect: Connect) -> None:
    first, second = connect(node.address, "first"), connect(node.address, "second")
    first.save(1, BASE)
    second.save_what_is_new(1, BASE + many(1))
    first.ask(Kind.DELETE, {"step": 1})
    assert used(node) == 9
    assert second.read(1) == BASE + many(1)
    third = connect(node.address, "third")
    assert third.save_what_is_new(1, many(2) + BASE) == [0]  # by content: it is at other places there
    second.ask(Kind.DELETE, {"step": 1})
    assert third.read(1) == many(2) + BASE
    third.ask(Kind.DELETE, {"step": 1})
    assert (used(node), node.arena.reserved) == (0, 0)
    assert connect(node.address, "fourth").save_what_is_new(1, BASE) == list(range(8))  # nothing is left of it


def test_a_run_finds_its_own_chunks_of_earlier_steps(start_node: Start, connect: Connect) -> None:
    node = start_node(buffers=3)
    client = connect(node.address, "run")
    client.save(1, many(1, 2, 3))
    client.save(2, many(4, 5, 6))
    assert client.save_what_is_new(3, many(1, 5, 7)) == [2]
    assert client.read(3) == many(1, 5, 7)


def test_whoever_knows_only_digests_gets_nothing(node: MemoryNode, connect: Connect) -> None:
    connect(node.address, "secret").save(1, BASE)
    liar = connect(node.address, "liar")
    liar.begin(1, len(BASE))
    digests = {chunk: digest_of(part) for chunk, part in enumerate(chunks_of(BASE))}
    assert liar.offer(1, digests) == list(
        digests
    )  # that somebody has them is told, as it would be by the time of a save
    guesses = {chunk: content(99, BLOCK) for chunk in digests}
    assert liar.link(1, guesses, digests=digests) == []
    assert node.counters.false_proofs == MOST_FALSE
    with pytest.raises(StoreUnavailable, match="8 of 8 chunks are missing"):
        liar.seal(1, list(digests))
    # And after so many lies nothing is compared for this connection any more, be it true.
    assert liar.link(1, {0: chunks_of(BASE)[0]}) == []
    liar.ask(Kind.ABORT, {"step": 1})
    assert (used(node), node.arena.reserved) == (8, 0)


@pytest.mark.parametrize(("wrong", "shared"), [(7, [0]), (8, [])])
def test_after_eight_wrong_proofs_a_connection_shares_nothing_more(
    wrong: int, shared: list[int], node: MemoryNode, connect: Connect
) -> None:
    data = content(1, BLOCK)
    connect(node.address, "first").save(1, data)
    other = connect(node.address, "second")
    other.begin(1, BLOCK)
    for _ in range(wrong):
        assert other.link_with(1, {0: digest_of(data)}, [bytes(32)]) == []
    assert other.link(1, {0: data}) == shared


def test_a_proof_is_of_no_use_on_another_connection(node: MemoryNode, connect: Connect) -> None:
    connect(node.address, "first").save(1, BASE)
    one, other = connect(node.address, "second"), connect(node.address, "second")
    one.begin(1, len(BASE))
    key = frames.content_key(one.node_nonce, one.client_nonce)
    proof = frames.content_proof(key, [memoryview(content(10, BLOCK))])
    digests = {0: digest_of(content(10, BLOCK))}
    assert other.link_with(1, digests, [proof]) == []
    assert one.link_with(1, digests, [proof]) == [0]


def colliding() -> tuple[bytes, bytes]:
    """Two blocks with one xxh3: where half a lane equals the hash's own secret, the other half is only added up."""
    made = []
    for first, second in ((1, 2), (2, 1)):
        block = bytearray(content(5, BLOCK))
        block[0:8] = bytes.fromhex("b8fe6c39") + struct.pack("<I", first)
        block[64:72] = bytes.fromhex("7c01812c") + struct.pack("<I", second)
        made.append(bytes(block))
    return made[0], made[1]


def test_two_contents_with_one_digest_are_not_taken_for_each_other(node: MemoryNode, connect: Connect) -> None:
    poison, honest = colliding()
    assert digest_of(poison) == digest_of(honest)
    assert poison != honest
    connect(node.address, "attacker").save(1, poison)
    victim = connect(node.address, "victim")
    assert victim.save_what_is_new(1, honest) == [0]
    assert victim.get(1, 0) == honest
    assert node.counters.false_proofs == 1


def test_a_damaged_block_is_not_shared(node: MemoryNode, connect: Connect) -> None:
    first, second, third = (connect(node.address, name) for name in ("first", "second", "third"))
    first.save(1, BASE)
    block = node.runs.find("first").checkpoints[1]._blocks[3]  # type: ignore[union-attr]
    node.arena.view(block, BLOCK)[7] ^= 1
    assert second.save_what_is_new(1, BASE) == [3]
    assert second.read(1) == BASE
    assert third.save_what_is_new(1, BASE) == []  # the good one is found now
    assert third.read(1) == BASE
    with pytest.raises(StoreError, match="damaged"):
        first.read(1)


def test_room_is_needed_for_what_is_new_alone(start_node: Start, connect: Connect) -> None:
    node = start_node(capacity_bytes=11 * BLOCK)
    connect(node.address, "first").save(1, BASE)
    second = connect(node.address, "second")
    with pytest.raises(StoreUnavailable, match="step 1 needs"):
        second.begin(1, 10 * BLOCK)
    assert second.save_what_is_new(1, BASE + many(1, 2), lean=True) == [8, 9]
    assert second.read(1) == BASE + many(1, 2)
    assert (used(node), node.arena.reserved) == (10, 0)


def test_a_save_that_shares_less_than_it_hoped_fails_and_leaves_nothing(start_node: Start, connect: Connect) -> None:
    node = start_node(capacity_bytes=10 * BLOCK)
    first, second = connect(node.address, "first"), connect(node.address, "second")
    first.save(1, BASE)
    with pytest.raises(StoreUnavailable, match=r"needs .*, and the node.*--capacity"):
        second.save_what_is_new(1, many(1, 2, 3, 4), lean=True)
    second.ask(Kind.ABORT, {"step": 1})
    assert (used(node), node.arena.reserved) == (8, 0)
    assert second.save_what_is_new(2, many(10, 1, 2), lean=True) == [1, 2]
    assert first.read(1) == BASE


def test_what_is_shared_gives_its_room_back_at_once(start_node: Start, connect: Connect) -> None:
    node = start_node(capacity_bytes=18 * BLOCK)
    connect(node.address, "first").save(1, BASE)
    second, third = connect(node.address, "second"), connect(node.address, "third")
    second.begin(1, len(BASE))
    assert node.arena.reserved == 8
    second.link(1, dict(enumerate(chunks_of(BASE))))
    assert node.arena.reserved == 0
    third.save(1, many(*range(20, 30)))  # while the second is still under way
    second.publish(manifest_of(BASE, "second", 1))
    assert second.read(1) == BASE


def test_what_nobody_finishes_holds_nothing(start_node: Start, connect: Connect) -> None:
    node = start_node(limits={"upload_idle_s": 0.2})
    connect(node.address, "first").save(1, BASE)
    lost = Client(node.address, "second")
    lost.begin(1, len(BASE) + BLOCK)
    lost.link(1, dict(enumerate(chunks_of(BASE))))
    lost.put(1, 8, many(1))
    lost.close()
    connect(node.address, "first").ask(Kind.DELETE, {"step": 1})
    assert used(node) == 9  # what is linked is held by the upload
    wait_until(lambda: used(node) == 0)
    assert node.arena.reserved == 0


def test_a_newer_session_takes_nothing_with_it_that_others_share(node: MemoryNode, connect: Connect) -> None:
    first = connect(node.address, "first")
    first.save(1, BASE)
    second = connect(node.address, "second", session="a")
    second.begin(1, len(BASE))
    second.link(1, dict(enumerate(chunks_of(BASE))))
    again = connect(node.address, "second", session="b")
    with pytest.raises(StoreError, match="newer session"):
        second.link(1, {0: content(10, BLOCK)})
    assert (used(node), node.arena.reserved) == (8, 0)
    assert again.save_what_is_new(1, BASE) == []
    assert first.read(1) == again.read(1) == BASE


@pytest.mark.parametrize(
    ("kind", "body", "words"),
    [
        (Kind.OFFER, b"x" * 13, "not a multiple of 12"),
        (Kind.LINK, b"x" * 45, "not a multiple of 44"),
    ],
)
def test_offers_that_are_cut_off_are_malformed(
    node: MemoryNode, connect: Connect, kind: Kind, body: bytes, words: str
) -> None:
    client = connect(node.address, "run")
    client.begin(1, BLOCK)
    with pytest.raises(frames.ProtocolError, match=words):
        client.ask(kind, {"step": 1}, body)


def test_offers_that_make_no_sense_are_refused(node: MemoryNode, connect: Connect) -> None:
    client = connect(node.address, "run")
    with pytest.raises(NotFound, match="BEGIN comes first"):
        client.offer(1, {0: 1})
    client.begin(1, BLOCK)
    with pytest.raises(StoreError, match="but not chunk 1"):
        client.offer(1, {1: 1})
    with pytest.raises(StoreError, match="but not chunk 7"):
        client.link(1, {7: b""})
    with pytest.raises(StoreError, match=f"{MOST_OFFERED} are allowed"):
        client.offer(1, dict.fromkeys(range(MOST_OFFERED + 1), 1))
    assert client.offer(1, {}) == client.link(1, {}) == []
    client.save_chunks(1, many(1))
    client.publish(manifest_of(many(1), "run", 1))
    with pytest.raises(StoreError, match="is over"):
        client.link(1, {0: many(1)})


def test_a_chunk_of_another_length_is_another_content(node: MemoryNode, connect: Connect) -> None:
    connect(node.address, "first").save(1, BASE)
    second = connect(node.address, "second")
    second.begin(1, BLOCK - 4096)
    assert second.offer(1, {0: digest_of(content(10, BLOCK))}) == []


def test_what_is_shared_is_spilled_whole_and_served_after_kill_minus_nine(tmp_path: Path, connect: Connect) -> None:
    (tmp_path / "spill").mkdir()
    words = ("--spill", str(tmp_path / "spill"))
    with NodeProcess(tmp_path, *words) as running:
        first, second = connect(running.address, "first"), connect(running.address, "second")
        first.save(1, BASE + many(1))
        assert second.save_what_is_new(1, BASE + many(2)) == [8]
        wait_until(lambda: second.status()["spill_written"] == 2)
        running.kill()
    with NodeProcess(tmp_path, *words) as running:
        first, second = connect(running.address, "first"), connect(running.address, "second", session="s2")
        first.ask(Kind.DELETE, {"step": 1})
        assert second.read(1) == BASE + many(2)
        second.begin(2, 10 * BLOCK)
        assert second.offer(2, {0: digest_of(content(10, BLOCK))}) == []  # on disk only: KEEP brings it back
        second.keep(2, 1, {chunk: digest_of(part) for chunk, part in enumerate(chunks_of(BASE))})
        second.put(2, 8, many(3))
        second.put(2, 9, many(4))
        second.publish(manifest_of(BASE + many(3, 4), "second", 2))
        assert connect(running.address, "third").save_what_is_new(1, BASE) == []


def test_hundreds_of_saves_of_three_runs_leave_no_reference_behind(node: MemoryNode, connect: Connect) -> None:
    runs = [connect(node.address, name) for name in ("one", "two", "three")]
    for step in range(1, 101):
        for number, client in enumerate(runs):
            client.save_what_is_new(step, BASE + many(1000 * number + step))
    assert used(node) == 8 + 6  # two checkpoints of each run, with one block of their own
    assert all(client.read(100) == BASE + many(1000 * n + 100) for n, client in enumerate(runs))
    for client in runs:
        for step in list(client.steps()):
            client.ask(Kind.DELETE, {"step": step})
    assert (used(node), node.arena.reserved) == (0, 0)
    runs[0].begin(101, len(BASE))
    assert runs[0].offer(101, dict(enumerate(map(digest_of, chunks_of(BASE))))) == [], "its contents are forgotten, too"


def test_offers_find_nothing_where_nothing_is_common(node: MemoryNode, connect: Connect) -> None:
    client = connect(node.address, "run")
    client.save(1, BASE)
    client.begin(2, 32 * BLOCK)
    assert client.offer(2, {chunk: chunk for chunk in range(32)}) == []
