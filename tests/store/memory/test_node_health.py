"""A node that hangs is known to all who use a store; one that is slow, or that nothing can replace, is waited for."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress

import pytest

from deepvm.errors import StoreUnavailable
from deepvm.memnode import Limits, MemoryNode
from deepvm.protocol.frames import Kind
from deepvm.store.memory import health
from deepvm.store.memory.store import MemoryStore
from deepvm.store.memory.upload import begin
from tests.support.waiting import wait_until

BLOCK = 64 * 2**10


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepvm.store.memory.store.GREET_S", 0.3)
    monkeypatch.setattr("deepvm.store.memory.store.SLOW_S", 0.15)
    monkeypatch.setattr(health, "AGAIN_S", 0.3)


@contextmanager
def a_node(listen: str = "127.0.0.1:0") -> Iterator[MemoryNode]:
    limits = Limits(stop_s=0.0, flush_s=0.0)
    with MemoryNode(listen=listen, capacity_bytes=16 * BLOCK, block_bytes=BLOCK, limits=limits) as node:
        yield node


class Silent:
    """Its system accepts connections, and nobody answers them: as of a process that is stopped."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._asked: list[socket.socket] = []

    def asked(self) -> int:
        """How many connections were made so far."""
        with suppress(BlockingIOError):
            while self._listener.fileno() >= 0:
                self._asked.append(self._listener.accept()[0])
        return len(self._asked)

    def close(self) -> None:
        self.asked()
        for one in (*self._asked, self._listener):
            one.close()


@contextmanager
def silent_node() -> Iterator[str]:
    with closing(Silent()) as silent:
        yield silent.address


def test_a_node_that_waits_for_other_ranks_is_not_taken_for_hung() -> None:
    with (
        a_node() as first,
        a_node() as second,
        closing(MemoryStore([first.address, second.address], replicas=2)) as store,
    ):
        connection = store.connect(first.address, "run", write=True)
        share = store.share_of(first.address)
        begin(connection, 1, BLOCK, BLOCK, layout="", rank=0, world_size=2, share=share)
        meta = {"step": 1, "world_size": 2, "timeout_s": 1.0}
        with pytest.raises(StoreUnavailable, match="states of 2 of 2 ranks are missing"):
            connection.call(Kind.EXTRAS, meta, timeout_s=1.0)
        assert not store.health.is_hung(first.address)
        connection.close()


def test_a_node_that_hangs_is_not_asked_again_until_it_answers() -> None:
    with ExitStack() as stack:
        silent = stack.enter_context(closing(Silent()))
        node = stack.enter_context(a_node())
        store = stack.enter_context(closing(MemoryStore([node.address, silent.address], replicas=2)))
        assert store.runs() == []
        assert store.health.is_hung(silent.address)
        before = silent.asked()
        for _ in range(20):
            with pytest.raises(StoreUnavailable, match="did not answer in time"):
                store.connect(silent.address, "run", write=True)
        assert silent.asked() < before + 20, "at most by the thread that asks again"
        assert "deepvm-health" in {thread.name for thread in threading.enumerate()}
        silent.close()
        stack.enter_context(a_node(silent.address))
        wait_until(lambda: not store.health.is_hung(silent.address), "the node's answer")


def test_a_node_that_nothing_can_replace_is_waited_for() -> None:
    with silent_node() as one, silent_node() as other, closing(MemoryStore([one, other], replicas=2)) as store:
        with pytest.raises(StoreUnavailable):
            store.connect(one, "run")
        assert store.health.is_hung(one)
        assert not store.health.can_spare(other)
        store.health.stalled(other)  # raises nothing: its wait goes on to its own deadline
        assert not store.health.is_hung(other)


def test_a_closed_store_asks_no_node_any_more() -> None:
    with silent_node() as address, a_node() as node:
        store = MemoryStore([node.address, address], replicas=2)
        store.runs()
        store.close()
        assert "deepvm-health" not in {thread.name for thread in threading.enumerate()}


def test_a_node_that_hangs_is_logged_once_and_again_when_it_answers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(health, "AGAIN_S", 0.001)
    answers = threading.Event()

    def greet(node: str) -> None:
        if not answers.is_set():
            raise StoreUnavailable("it is silent")

    with closing(health.Health(greet, spare=1)) as found:
        for why in ("it is silent", "it is still silent"):
            found.suspect("n:1", StoreUnavailable(why))
        assert [record.getMessage() for record in caplog.records] == [
            "memory node n:1 hangs and is not used until it answers: it is silent"
        ]
        answers.set()
        wait_until(lambda: not found.is_hung("n:1"), "it answers")
    assert [record.getMessage() for record in caplog.records][1:] == ["memory node n:1 answers again"]
