"""Uploads of several ranks and connections: who waits for a chunk is told when it comes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from deepvm.errors import Corrupt
from deepvm.memnode.errors import RequestRefused
from deepvm.memnode.storage import upload as upload_module
from deepvm.memnode.storage.arena import Arena
from deepvm.memnode.storage.budgets import KeptDocuments
from deepvm.memnode.storage.upload import Begin, Upload
from deepvm.protocol.placement import Share
from tests.support.memnode.client import BLOCK, content, manifest_of
from tests.support.waiting import wait_until

CHUNKS = 3
WAIT_S = 10.0


def _stays() -> bool:
    """The client that waits is not gone."""
    return False


@pytest.fixture
def upload(monkeypatch: pytest.MonkeyPatch) -> Iterator[Upload]:
    monkeypatch.setattr(upload_module, "_LOOK_S", 600.0)  # so that nothing is found by looking again
    arena = Arena(CHUNKS * BLOCK, BLOCK)
    arena.reserve(CHUNKS)
    begin = Begin(step=7, size_bytes=CHUNKS * BLOCK, layout="", rank=0, world_size=2, share=Share())
    yield Upload(arena, begin, KeptDocuments(2**20), session="s", reserved=CHUNKS, room_s=0.0)
    arena.close()


def after_waiting(upload: Upload, wait: Callable[[], Any], then: Callable[[], None]) -> Any:
    """What ``wait`` returns, if ``then`` is called once it waits."""
    upload.touched_s = 0.0
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        wait_until(lambda: upload.touched_s, "it looks, and has the lock until it waits")
        then()
        try:
            return waiting.result(WAIT_S)
        finally:
            upload.end(RequestRefused("failed", "the test is over"))


def test_a_seal_is_answered_when_the_last_chunk_arrives(upload: Upload) -> None:
    for chunk in (0, 1):
        upload.finish(chunk, upload.start(), chunk + 10)
    block = upload.start()
    found = after_waiting(upload, lambda: upload.seal([0, 2], 60.0, _stays), lambda: upload.finish(2, block, 12))
    assert found == [10, 12]


def test_the_states_of_all_ranks_are_answered_when_the_last_one_arrives(upload: Upload) -> None:
    upload.add_extra(0, b'{"rank": 0}')
    found = after_waiting(upload, lambda: upload.extras(2, 60.0, _stays), lambda: upload.add_extra(1, b'{"rank": 1}'))
    assert found == b'[{"rank": 0},{"rank": 1}]'


def test_whoever_waits_is_told_why_the_upload_ended(upload: Upload) -> None:
    with pytest.raises(RequestRefused, match="taken back"):
        after_waiting(
            upload,
            lambda: upload.seal([0], 60.0, _stays),
            lambda: upload.end(RequestRefused("failed", "it is taken back")),
        )


def test_a_manifest_has_sixteen_digits_for_each_chunk_and_a_limit_for_the_rest(
    upload: Upload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload_module, "MOST_FACTS_BYTES", 100)
    upload.check_manifest_length(16 * CHUNKS + 100)
    with pytest.raises(RequestRefused, match="has 149 bytes, at most 148 are allowed"):
        upload.check_manifest_length(16 * CHUNKS + 101)


def test_blocks_that_were_filled_for_it_are_counted_and_shared_ones_are_not(upload: Upload) -> None:
    assert upload.taken == 0
    upload.finish(0, upload.start(), 10)
    assert upload.taken == 1
    kept = upload.arena.take(reserved=True)
    upload.share(1, kept, 11)
    assert upload.taken == 1
    upload.end(RequestRefused("failed", "the test is over"))


class OnDisk:
    """A checkpoint whose first chunk is in memory; the others are on a disk."""

    def __init__(self, arena: Arena, *, readable: bool) -> None:
        self._arena, self._readable = arena, readable
        self.step, self.manifest = 3, manifest_of(content(1, CHUNKS * BLOCK), "run", 3)
        self.block = arena.take(reserved=False)

    def has(self, chunk: int) -> bool:
        return True

    def hold(self, chunk: int) -> int | None:
        if chunk:
            return None
        self._arena.hold(self.block)
        return self.block

    def read(self, chunk: int, block: int) -> None:
        if not self._readable:
            raise Corrupt("damaged")


@pytest.mark.parametrize("readable", [True, False])
def test_kept_chunks_are_read_back_from_the_disk_all_or_none(readable: bool) -> None:
    arena = Arena((CHUNKS + 2) * BLOCK, BLOCK)
    arena.reserve(CHUNKS)
    begin = Begin(step=7, size_bytes=CHUNKS * BLOCK, layout="", rank=0, world_size=1, share=Share())
    upload = Upload(arena, begin, KeptDocuments(2**20), session="s", reserved=CHUNKS, room_s=0.0)
    before: Any = OnDisk(arena, readable=readable)
    digests = list(before.manifest.digests)
    if readable:
        upload.keep(before, [0, 1], digests[:2])
        assert (upload.receiving, sorted(upload.blocks)) == (0, [0, 1])
        assert upload.seal([0, 1], 0.0, _stays) == digests[:2]
        assert (arena.used, arena.reserved) == (2, 1)
    else:
        with pytest.raises(RequestRefused, match="1 of 2 chunks are not kept of step 3"):
            upload.keep(before, [0, 1], digests[:2])
        with pytest.raises(RequestRefused, match="2 of 3 chunks are not kept of step 3"):
            upload.keep(before, [0, 1, 2], [digests[0], 5, 6])
        assert (upload.receiving, upload.blocks) == (0, {})
        assert (arena.used, arena.reserved) == (1, CHUNKS)
    upload.end(RequestRefused("failed", "the test is over"))
    arena.drop(before.block)
    assert (arena.used, arena.reserved) == (0, 0)
    arena.close()


def test_a_block_that_is_cancelled_is_room_for_its_chunk_again_until_the_upload_has_ended(upload: Upload) -> None:
    arena = upload.arena
    first, second = upload.start(), upload.start()
    assert (arena.used, arena.reserved) == (2, CHUNKS - 2)
    upload.cancel(first)
    assert (arena.used, arena.reserved) == (1, CHUNKS - 1)
    upload.end(RequestRefused("failed", "the test is over"))
    assert (arena.used, arena.reserved) == (1, 0)
    upload.cancel(second)
    assert (arena.used, arena.reserved) == (0, 0)


def partial(arena: Arena, room_s: float) -> Upload:
    """An upload that began without room for what it may need."""
    begin = Begin(
        step=7, size_bytes=CHUNKS * BLOCK, layout="", rank=0, world_size=1, share=Share(), partial_reservation=True
    )
    return Upload(arena, begin, KeptDocuments(2**20), session="s", reserved=0, room_s=room_s)


def test_an_upload_without_a_reservation_waits_for_a_block_that_becomes_free() -> None:
    arena = Arena(CHUNKS * BLOCK, BLOCK)
    taken = [arena.take(reserved=False) for _ in range(CHUNKS)]
    upload = partial(arena, room_s=30.0)
    threading.Timer(0.05, arena.drop, (taken[1],)).start()
    assert upload.start() == taken[1]
    with pytest.raises(RequestRefused, match="has no room left for what changed: give it a larger --capacity"):
        partial(arena, room_s=0.0).start()
    arena.close()


def test_a_chunk_that_is_sent_twice_needs_a_free_block_and_waits_for_none(upload: Upload) -> None:
    for chunk in range(CHUNKS):
        upload.finish(chunk, upload.start(), chunk)
    with pytest.raises(RequestRefused, match="no block is free for a chunk that is sent a second time: try again"):
        upload.start()


def test_an_upload_larger_than_the_node_says_so() -> None:
    arena = Arena(2 * BLOCK, BLOCK)
    upload = partial(arena, room_s=0.0)
    for chunk in range(2):
        upload.finish(chunk, upload.start(), chunk)
    with pytest.raises(RequestRefused, match=r"step 7 needs 197 kB, and the node has 131 kB in all: start it with"):
        upload.start()
    arena.close()


def test_chunks_beyond_the_last_are_refused(upload: Upload) -> None:
    assert [upload.length(chunk) for chunk in range(CHUNKS)] == [BLOCK] * CHUNKS
    for chunk in (-1, CHUNKS):
        with pytest.raises(RequestRefused, match=f"step 7 has 3 chunks, but not chunk {chunk}"):
            upload.length(chunk)
    with pytest.raises(RequestRefused, match="step 7 has 3 chunks, 4 were named"):
        upload.seal([0, 1, 2, 2], 0.0, _stays)
    with pytest.raises(RequestRefused, match="rank 2 is out of range for world_size 2"):
        upload.add_extra(2, b"{}")
    with pytest.raises(RequestRefused, match="world_size is 3, the upload began with 2"):
        upload.extras(3, 0.0, _stays)


def test_ranks_that_join_must_agree_on_what_is_saved(upload: Upload) -> None:
    mine = upload.begin
    upload.join(replace(mine, rank=1))
    for change, what in (
        ({"size_bytes": 5}, "bytes"),
        ({"layout": "x" * 50}, "layout"),
        ({"world_size": 3}, "world size"),
        ({"share": Share(nodes=2, index=0, replicas=1)}, "share of the chunks"),
        ({"attempt": 9}, "attempt"),
    ):
        with pytest.raises(RequestRefused, match=f"step 7: rank 1 and rank 0 disagree on the {what} "):
            upload.join(replace(mine, rank=1, **change))  # type: ignore[arg-type]


def test_a_wait_ends_at_once_where_the_client_is_gone(upload: Upload) -> None:
    with pytest.raises(RequestRefused, match="step 7: 1 of 1 chunks are missing"):
        upload.seal([0], 600.0, lambda: True)
