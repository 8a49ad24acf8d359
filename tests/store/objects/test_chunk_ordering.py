"""Chunks in any order become a stream in order, within a budget, and nobody waits for ever."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepvm.errors import StoreError, StoreUnavailable
from deepvm.store.objects.ordered_stream import OrderedStream


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


def test_a_stream_that_takes_nothing_is_told() -> None:
    chunks = OrderedStream(10, budget_bytes=10, stall_s=0.05)
    chunks.add(0, bytes(10))
    with pytest.raises(StoreUnavailable, match=r"within 0\.05 s"):
        chunks.add(1, bytes(10))


def test_a_chunk_that_never_comes_and_a_publication_that_never_comes_are_told() -> None:
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
