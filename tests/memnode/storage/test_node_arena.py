"""The node's memory: no block twice, never more than there is, and pages only where they are needed."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepvm.errors import UsageError
from deepvm.memnode import MemoryNode
from deepvm.memnode.settings import Settings
from deepvm.memnode.storage.arena import Arena, ArenaFull
from deepvm.protocol import frames
from deepvm.protocol.placement import Share
from tests.support.memnode.client import BLOCK
from tests.support.waiting import wait_until

MOVES = st.tuples(st.sampled_from(["reserve", "take", "free", "hold", "drop"]), st.integers(0, 7))


@given(moves=st.lists(MOVES, max_size=60))
@settings(max_examples=60, deadline=None)
def test_blocks_and_reservations_never_exceed_the_capacity(moves: list[tuple[str, int]]) -> None:
    arena = Arena(8 * BLOCK, BLOCK)
    held: list[int] = []  # one entry a reference
    reserved = 0
    try:
        for move, number in moves:
            if move == "reserve":
                if number <= 8 - len(set(held)) - reserved:
                    arena.reserve(number)
                    reserved += number
                else:
                    with pytest.raises(ArenaFull):
                        arena.reserve(number)
            elif move == "take" and reserved:
                block = arena.take(reserved=True)
                assert block not in held
                held.append(block)
                reserved -= 1
            elif move == "free":
                if len(set(held)) + reserved < 8:
                    block = arena.take(reserved=False)
                    assert block not in held
                    held.append(block)
                else:
                    with pytest.raises(ArenaFull):
                        arena.take(reserved=False)
            elif move == "hold" and held:
                block = held[number % len(held)]
                arena.hold(block)
                held.append(block)
            elif move == "drop" and held:
                block = held.pop(number % len(held))
                assert arena.drop(block, reserve=True) == (block not in held)
                reserved += block not in held
            assert (arena.used, arena.reserved) == (len(set(held)), reserved)
            assert arena.free == 8 - arena.used - reserved >= 0
    finally:
        arena.close()


def test_the_warmest_block_is_used_again_first() -> None:
    arena = Arena(8 * BLOCK, BLOCK)
    blocks = [arena.take(reserved=False) for _ in range(3)]
    for block in (blocks[1], blocks[0], blocks[2]):
        arena.drop(block)
    assert [arena.take(reserved=False) for _ in range(4)] == [blocks[2], blocks[0], blocks[1], 3]
    arena.close()


def test_blocks_do_not_overlap() -> None:
    arena = Arena(4 * BLOCK, BLOCK)
    for block in range(4):
        arena.view(block, BLOCK)[:] = bytes([block + 1]) * BLOCK
    assert all(arena.view(block, BLOCK) == bytes([block + 1]) * BLOCK for block in range(4))
    arena.close()


def test_capacity_costs_no_memory_before_it_is_needed() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident()
    arena = Arena(4 * 2**30, 4 * 2**20)
    arena.start()
    assert resident() - before < 64 * 2**20
    arena.reserve(8)
    wait_until(lambda: arena.touched >= 8)
    assert 24 * 2**20 < resident() - before < 160 * 2**20
    arena.close()
    wait_until(lambda: resident() - before < 16 * 2**20)


def test_a_reservation_waits_for_room_until_its_deadline() -> None:
    arena = Arena(2 * BLOCK, BLOCK)
    arena.reserve(2)
    started = time.monotonic()
    with pytest.raises(ArenaFull, match="1 blocks needed, 0 free"):
        arena.reserve(1, timeout_s=0.1)
    assert 0.09 < time.monotonic() - started < 2
    arena.close()


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 60))
def test_shares_cover_every_chunk_as_often_as_there_are_replicas(nodes: int, replicas: int, chunks: int) -> None:
    replicas = min(replicas, nodes)
    shares = [Share(nodes=nodes, index=index, replicas=replicas) for index in range(nodes)]
    for chunk in range(chunks):
        assert {s.index for s in shares if s.has(chunk)} == {(chunk + j) % nodes for j in range(replicas)}
    assert [share.count(chunks) for share in shares] == [sum(map(share.has, range(chunks))) for share in shares]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"capacity_bytes": 100}, "less than one block"),
        ({"capacity_bytes": 2**60}, "more than the .* of memory"),
        ({"block_bytes": 12345}, "multiple of 4096"),
        ({"buffers": 0}, "at least one checkpoint"),
        ({"spill": "/does/not/exist"}, "/does/not does not exist"),
        ({"listen": "here"}, "is not a valid address"),
        ({"listen": "::1:70"}, "ambiguous"),
        ({"token": ""}, "the token is empty: put some random text into its file"),
        ({"tls_cert": "a"}, "both a certificate and its key"),
        ({"durable": "memory://127.0.0.1:1"}, "not durable"),
    ],
)
def test_settings_that_cannot_be_met_are_refused_in_a_sentence(fields: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        MemoryNode(**{"capacity_bytes": 64 * BLOCK, "block_bytes": BLOCK, **fields})


def test_settings_at_their_limits_are_taken() -> None:
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for capacity_bytes in (BLOCK, machine_bytes):
        assert Settings(capacity_bytes=capacity_bytes, block_bytes=BLOCK, buffers=1).capacity_bytes == capacity_bytes
    for capacity_bytes in (BLOCK - 1, machine_bytes + 1):
        with pytest.raises(UsageError, match="a capacity of"):
            Settings(capacity_bytes=capacity_bytes, block_bytes=BLOCK)
    for block_bytes in (frames.LEAST_BLOCK_BYTES, frames.MOST_BLOCK_BYTES):
        assert Settings(capacity_bytes=2**30, block_bytes=block_bytes).block_bytes == block_bytes
    for block_bytes in (frames.LEAST_BLOCK_BYTES - 4096, frames.MOST_BLOCK_BYTES + 4096, BLOCK + 1):
        with pytest.raises(UsageError, match=f"block_bytes is {block_bytes}: it must be a multiple of 4096"):
            Settings(capacity_bytes=2**30, block_bytes=block_bytes)


def test_a_node_that_cannot_be_made_gives_its_memory_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Arena] = []

    def make(capacity_bytes: int, block_bytes: int) -> Arena:
        made.append(Arena(capacity_bytes, block_bytes))
        return made[-1]

    monkeypatch.setattr("deepvm.memnode.server.Arena", make)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"the spill directory .*/file cannot be written"):
        MemoryNode(capacity_bytes=64 * BLOCK, block_bytes=BLOCK, spill=tmp_path / "file")
    with pytest.raises(ValueError, match="released"):
        made[0].view(0, 1)


def test_more_memory_than_there_are_addresses_and_more_than_a_block_are_refused() -> None:
    with pytest.raises(UsageError, match="of memory cannot be mapped"):
        Arena(2**62, BLOCK)
    arena = Arena(2 * BLOCK, BLOCK)
    assert [arena.view(block, BLOCK).nbytes for block in (0, 1)] == [BLOCK, BLOCK]
    with pytest.raises(ValueError, match=f"{BLOCK + 1} bytes of a block of {BLOCK}"):
        arena.view(0, BLOCK + 1)
    arena.close()


def test_a_node_starts_nothing_before_start_and_can_be_stopped_without_it(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    node = MemoryNode(capacity_bytes=64 * BLOCK, block_bytes=BLOCK, spill=tmp_path / "spill", metrics="127.0.0.1:0")
    assert set(threading.enumerate()) == before
    assert (node.address, node.arena.touched) == ("", 0)
    node.stop()
    MemoryNode(capacity_bytes=64 * BLOCK, block_bytes=BLOCK, spill=tmp_path / "spill").stop()  # it is unlocked
