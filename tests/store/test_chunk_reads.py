"""The threads that work through a checkpoint's chunks."""

from __future__ import annotations

import threading

import pytest

from deepvm.store.chunk_reads import for_each_chunk
from tests.support.store.checkpoints import CHUNK, manifest_of, payload

CHUNKS = 20
MANIFEST = manifest_of(payload((CHUNKS - 1) * CHUNK + 5), "run-a", 1)
WAIT_S = 30.0


@pytest.mark.parametrize("threads", [1, 3, 2 * CHUNKS])
def test_each_chunk_is_worked_on_once_with_a_buffer_of_its_length(threads: int) -> None:
    done: list[tuple[int, int]] = []
    for_each_chunk(MANIFEST, lambda chunk, buffer: done.append((chunk, len(buffer))), threads=threads)
    assert sorted(done) == [(chunk, MANIFEST.span(chunk)[1]) for chunk in range(CHUNKS)]


def test_only_the_wanted_chunks_are_worked_on() -> None:
    done: list[int] = []
    for_each_chunk(MANIFEST, lambda chunk, _: done.append(chunk), threads=2, chunks=[7, 3])
    assert sorted(done) == [3, 7]
    for_each_chunk(MANIFEST, lambda chunk, _: done.append(chunk), threads=2, chunks=[])
    assert sorted(done) == [3, 7]


def test_the_first_failure_stops_the_others_and_is_raised() -> None:
    failed, done = threading.Event(), list[int]()

    def work(chunk: int, _: memoryview) -> None:
        if chunk == 0:
            failed.set()
            raise KeyError("chunk 0")
        assert failed.wait(WAIT_S)
        done.append(chunk)

    with pytest.raises(KeyError, match="chunk 0"):
        for_each_chunk(MANIFEST, work, threads=3)
    assert len(done) < CHUNKS - 1


def test_what_the_watch_raises_stops_the_threads_and_leaves_a_hung_one_behind() -> None:
    asked, hung = list[int](), threading.Event()

    def work(chunk: int, _: memoryview) -> None:
        asked.append(chunk)
        assert hung.wait(WAIT_S)

    def watch() -> None:
        if asked:
            raise InterruptedError

    try:
        with pytest.raises(InterruptedError):
            for_each_chunk(MANIFEST, work, threads=1, watch=watch, grace_s=0.01)
    finally:
        hung.set()
    assert asked == [0]


def test_what_the_watch_raises_waits_for_the_chunk_under_way() -> None:
    asked, stopped, done = threading.Event(), threading.Event(), list[int]()

    def work(chunk: int, _: memoryview) -> None:
        asked.set()
        assert stopped.wait(WAIT_S)
        done.append(chunk)

    def watch() -> None:
        if asked.is_set():
            threading.Timer(0.02, stopped.set).start()
            raise InterruptedError

    with pytest.raises(InterruptedError):
        for_each_chunk(MANIFEST, work, threads=1, watch=watch)
    assert done == [0]
