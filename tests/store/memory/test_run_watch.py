"""RunWatch: states of a checkpoint, and waiting for a change of them, against real nodes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepvm.store.memory.store import MemoryStore
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
