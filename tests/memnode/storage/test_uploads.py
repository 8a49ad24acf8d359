"""Uploads of several ranks and connections: who waits for a chunk is told when it comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from deepvm.memnode.errors import RequestRefused
from deepvm.memnode.storage import upload as upload_module
from deepvm.memnode.storage.arena import Arena
from deepvm.memnode.storage.budgets import KeptDocuments
from deepvm.memnode.storage.upload import Begin, Upload
from deepvm.protocol.placement import Share
from tests.support.memnode.client import BLOCK
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
