"""RunWatch: states of a checkpoint, and waiting for a change of them, against real nodes."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from deepvm.protocol import frames
from deepvm.store.memory.store import MemoryStore
from tests.store.memory.test_hostile_nodes import hostile_node, ok
from tests.support.memnode.client import BLOCK, Client, content
from tests.support.waiting import wait_until

SIZE = 2 * BLOCK + 5


def test_a_change_is_awaited_not_polled(start_node: Any, connect: Callable[..., Client], tmp_path: Path) -> None:
    node = start_node(spill=tmp_path)
    client = connect(node.address, "run")
    with_store = MemoryStore([node.address], key="key")
    watch, states = with_store.watch("run"), {}
    assert watch.states(1) == {}
    threading.Timer(0.05, lambda: client.save(1, content(1, SIZE))).start()
    requests = 0
    while states.get(node.address) != "spilled":
        watch.wait(60)
        states = watch.states(1)
        requests += 1
    assert requests <= 3  # one each for: committed, spilled, and one in between
    assert watch.writes_on
    with_store.close()


def test_a_node_that_is_gone_does_not_hang_a_wait(start_node: Any, connect: Callable[..., Client]) -> None:
    node = start_node()
    connect(node.address, "run").save(1, content(1, SIZE))
    store = MemoryStore([node.address], key="key")
    watch = store.watch("run")
    assert watch.states(1) == {node.address: "remote"}
    waits = threading.Thread(target=watch.wait, args=(600.0,))
    waits.start()
    node.stop(now=True)
    wait_until(lambda: not waits.is_alive(), "the end of the wait")
    store.close()


def test_a_run_that_does_not_exist_yet_has_no_states(start_node: Any) -> None:
    store = MemoryStore([start_node().address], key="key")
    watch = store.watch("run")
    assert watch.states(1) == {}
    watch.wait(0.01)
    assert not watch.writes_on
    store.close()


def test_a_node_that_does_not_wait_is_not_asked_without_a_pause() -> None:
    rows = {"steps": [{"step": 1, "state": "remote"}], "version": 5}
    with hostile_node(STEPS=ok(rows)) as address, closing(MemoryStore([address])) as store:
        watch = store.watch("run")
        assert watch.states(1) == {address: "remote"}
        began = time.monotonic()
        for _ in range(3):
            watch.wait(0.1)
        assert time.monotonic() - began >= 0.14
        watch.wait(0.1, node="another:1")
        assert watch.states(2) == {}


def test_a_list_that_has_changed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = itertools.count()

    def answer(request: int) -> Iterator[bytes]:
        rows = {"steps": [], "version": next(versions)}
        yield frames.encode(frames.Kind.OK, request, rows)

    pauses: list[float] = []
    with hostile_node(STEPS=answer) as address, closing(MemoryStore([address])) as store:
        watch = store.watch("run")
        watch.states(1)
        monkeypatch.setattr("deepvm.store.memory.watch.time.sleep", pauses.append)
        watch.wait(60)
    assert pauses == []
