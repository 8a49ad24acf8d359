"""Chunks in any order become a stream in order, within a budget, and nobody waits for ever."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepvm.errors import StoreError, StoreUnavailable
from deepvm.store.objects import ordered_stream
from deepvm.store.objects.ordered_stream import OrderedStream
from tests.support.waiting import wait_until


@settings(deadline=None, max_examples=60)
@given(st.permutations(range(20)), st.integers(0, 300), st.integers(1, 4))
def test_every_order_comes_out_in_order(order: list[int], budget_bytes: int, threads: int) -> None:
    data = [bytes([chunk]) * (chunk % 7 + 10) for chunk in range(20)]
    chunks = OrderedStream(20, budget_bytes=budget_bytes, stall_s=20)
    with ThreadPoolExecutor(threads + 1) as pool:
        out = pool.submit(lambda: b"".join(chunks.stream()))
        shares = [order[k::threads] for k in range(threads)]
        list(pool.map(lambda share: [chunks.add(chunk, data[chunk]) for chunk in share], shares))
        chunks.seal()
        assert out.result(20) == b"".join(data)
    chunks.stop(StoreError("done"))


def test_whoever_brings_more_than_the_budget_waits_for_the_stream() -> None:
    chunks = OrderedStream(10, budget_bytes=30, stall_s=20)
    for chunk in range(3):
        chunks.add(chunk, bytes(10))
    fourth = threading.Thread(target=chunks.add, args=(3, bytes(10)))
    fourth.start()
    fourth.join(0.2)
    assert fourth.is_alive()
    stream = chunks.stream()
    next(stream)
    fourth.join(10)
    assert not fourth.is_alive()
    chunks.stop(StoreError("done"))


def test_chunks_up_to_the_budget_are_held_and_those_above_it_wait_or_are_spilled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chunks = OrderedStream(6, budget_bytes=30, stall_s=0.0)  # whoever has to wait fails at once
    for chunk in range(3):
        chunks.add(chunk, bytes(10))
    with pytest.raises(StoreUnavailable, match="the upload took none of 30 B within 0 s"):
        chunks.add(3, b"x")
    for twice in (0, 2):
        with pytest.raises(StoreError, match=f"chunk {twice} was put twice"):
            chunks.add(twice, b"")
    chunks = OrderedStream(6, budget_bytes=30, stall_s=0.0)
    monkeypatch.setattr(ordered_stream, "tempfile", SimpleNamespace(gettempdir=lambda: "/full", TemporaryFile=_full))
    for chunk in range(1, 4):
        chunks.add(chunk, bytes(10))
    with pytest.raises(StoreUnavailable, match=r"/full has no room for chunks that arrived early \(No space left"):
        chunks.add(4, b"x")
    chunks.add(0, bytes(100))  # the next one always has room
    assert chunks.taken == 0
    assert next(chunks.stream()) == bytes(100)
    assert chunks.taken == 1


def _full(**_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_stream_that_takes_nothing_is_reported() -> None:
    chunks = OrderedStream(10, budget_bytes=10, stall_s=0.05)
    chunks.add(0, bytes(10))
    with pytest.raises(StoreUnavailable, match=r"within 0\.05 s"):
        chunks.add(1, bytes(10))


def test_a_chunk_that_never_comes_and_a_publication_that_never_comes_are_reported() -> None:
    chunks = OrderedStream(2, budget_bytes=10, stall_s=0.05)
    chunks.add(0, b"a")
    stream = chunks.stream()
    assert next(stream) == b"a"
    with pytest.raises(StoreUnavailable, match="chunk 1 did not arrive"):
        next(stream)
    chunks = OrderedStream(1, budget_bytes=10, stall_s=0.05)
    chunks.add(0, b"a")
    with pytest.raises(StoreUnavailable, match="was not published"):
        list(chunks.stream())


def test_stopping_ends_every_wait_with_the_reason() -> None:
    chunks = OrderedStream(3, budget_bytes=10, stall_s=60)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: list(chunks.stream()))
        chunks.stop(StoreUnavailable("the network is gone"))
        with pytest.raises(StoreUnavailable, match="network is gone"):
            waiting.result(10)
    with pytest.raises(StoreUnavailable, match="network is gone"):
        chunks.add(0, b"a")


def test_a_stream_that_takes_chunks_slowly_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time to give up begins anew with each chunk that is taken."""
    now_s, read_at_s = 0.0, list[float]()

    def clock() -> float:
        read_at_s.append(now_s)
        return now_s

    monkeypatch.setattr(ordered_stream, "time", SimpleNamespace(monotonic=clock))
    chunks = OrderedStream(3, budget_bytes=20, stall_s=60)
    chunks.add(0, bytes(10))
    chunks.add(1, bytes(10))
    stream = chunks.stream()
    with ThreadPoolExecutor(1) as pool:
        third = pool.submit(chunks.add, 2, bytes(20))
        wait_until(lambda: len(read_at_s) >= 4, "it waits for room")
        now_s = 50.0
        next(stream)
        wait_until(lambda: 50.0 in read_at_s, "it saw that a chunk was taken")
        now_s = 100.0
        chunks.seal()  # wakes it, though there is no room yet
        wait_until(lambda: 100.0 in read_at_s, "it looked again")
        next(stream)
        third.result(10)
