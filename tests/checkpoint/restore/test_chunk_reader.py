"""Chunks are read in order of need, and those that can wait are read as soon as they may be."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, cast

import pytest

from deepvm.checkpoint.restore.chunk_reader import ChunkReader, Part
from deepvm.errors import StoreUnavailable
from deepvm.store.base import Manifest
from tests.support.store.checkpoints import CHUNK, manifest_of
from tests.support.waiting import wait_until


class InMemory:
    """Chunks that take no time. It tells when a reader asks whether to pause, which it does with the lock."""

    url, readers = "memory://", 1

    def __init__(self) -> None:
        self.pauses = threading.Event()
        self.read_chunks: list[int] = []

    @property
    def in_memory(self) -> bool:
        self.pauses.set()
        return True

    def read(self, manifest: Manifest, chunk: int, parts: Sequence[Part]) -> None:
        self.read_chunks.append(chunk)


def test_what_the_first_step_does_not_need_is_read_when_it_is_over() -> None:
    source = InMemory()
    manifest = manifest_of(bytes(4 * CHUNK), "run", 1)
    reader = ChunkReader(cast("Any", source), manifest, lambda chunk: (), [2, 0, 1, 3], eager_count=1)
    reader.start()
    try:
        assert source.pauses.wait(10)
        assert source.read_chunks == [2]
        reader.resume()
        wait_until(lambda: reader.has(range(4)), "all are read", timeout_s=10)
        assert source.read_chunks == [2, 0, 1, 3]
    finally:
        reader.close()


def test_a_chunk_that_is_waited_for_comes_before_the_others_and_they_stay_for_later() -> None:
    source = InMemory()
    manifest = manifest_of(bytes(4 * CHUNK), "run", 1)
    reader = ChunkReader(cast("Any", source), manifest, lambda chunk: (), [2, 0, 1, 3], eager_count=1)
    reader.start()
    try:
        assert source.pauses.wait(10)
        reader.wait([3], 10)
        assert source.read_chunks == [2, 3]
        reader.wait_all(10)
        assert sorted(source.read_chunks) == [0, 1, 2, 3]
    finally:
        reader.close()


def test_chunks_that_do_not_arrive_in_time_are_reported() -> None:
    let_go = threading.Event()

    class Slow(InMemory):
        in_memory = False  # type: ignore[assignment]

        def read(self, manifest: Manifest, chunk: int, parts: Sequence[Part]) -> None:
            assert let_go.wait(10)

    reader = ChunkReader(cast("Any", Slow()), manifest_of(bytes(4 * CHUNK), "run", 7), lambda chunk: (), range(4))
    reader.start()
    try:
        with pytest.raises(StoreUnavailable, match=r"step 7 did not arrive within 0\.01 s"):
            reader.wait([3], 0.01)
        let_go.set()
        reader.wait_all(10)
    finally:
        let_go.set()
        reader.close()
