"""Requests that wait at a node: for a change of the list, for other ranks, and no longer than their client."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from typing import Any

import pytest

from deepvm.errors import StoreError
from deepvm.memnode import MemoryNode
from deepvm.memnode.serving import requests
from deepvm.protocol.frames import Kind
from tests.support.memnode.client import BLOCK, Client, content
from tests.support.waiting import wait_until

Connect = Callable[..., Client]
SIZE = 2 * BLOCK + 5
LONG_S = 3600.0


def test_a_dead_client_that_waits_gives_its_place_back(node: MemoryNode, connect: Connect) -> None:
    writer = connect(node.address, "run")
    writer.begin(1, SIZE, world_size=2)
    waiting: list[tuple[Kind, dict[str, Any], bytes]] = [
        (Kind.STEPS, {"after": 0, "timeout_s": LONG_S}, b""),
        (Kind.SEAL, {"step": 1, "timeout_s": LONG_S}, struct.pack("<I", 0)),
        (Kind.EXTRAS, {"step": 1, "world_size": 2, "timeout_s": LONG_S}, b""),
    ]
    for kind, meta, body in waiting:
        client = connect(node.address, "run")
        client.send_document(kind, meta, body, tagged=body) if body else client.send(client.head_of(kind, meta))
        client.close()
    wait_until(lambda: node.connections == 1, "the end of those that wait")


def test_a_client_waits_for_a_change_for_a_minute_at_most(
    node: MemoryNode, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert requests._MOST_WATCH_S == 60
    monkeypatch.setattr(requests, "_MOST_WATCH_S", 0.05)
    assert connect(node.address, "run").ask(Kind.STEPS, {"after": 0, "timeout_s": LONG_S})[1]["steps"] == []


def test_the_version_counts_evictions(node: MemoryNode, connect: Connect) -> None:
    client = connect(node.address, "run")
    for step in (1, 2):
        client.save(step, content(step, SIZE))
    before = client.ask(Kind.STEPS)[1]
    client.begin(3, SIZE)  # two buffers: it evicts step 1
    after = client.ask(Kind.STEPS, {"after": before["version"], "timeout_s": LONG_S})[1]
    assert [row["step"] for row in after["steps"]] == [2]
    assert after["version"] > before["version"]


@pytest.mark.parametrize("write", [False, True], ids=["a missing run", "a run"])
@pytest.mark.parametrize(
    "meta",
    [{"after": odd} for odd in ("x\x1b", -1, 1.5, True, None, [], 10**400)]
    + [{"after": 0, "timeout_s": odd} for odd in (-5, "1", None, True)],
    ids=str,
)
def test_odd_values_are_refused_whether_or_not_the_run_exists(
    node: MemoryNode, connect: Connect, meta: dict[str, Any], write: bool
) -> None:
    client = connect(node.address, "run", write=write)
    with pytest.raises(StoreError, match=r"after|timeout_s|64 bits"):
        client.ask(Kind.STEPS, meta)


def test_a_client_can_wait_for_a_run_that_does_not_exist_yet(node: MemoryNode, connect: Connect) -> None:
    reader = connect(node.address, "run", write=False)
    assert reader.ask(Kind.STEPS)[1]["version"] == 0
    found: list[dict[str, Any]] = []
    waits = threading.Thread(target=lambda: found.append(reader.ask(Kind.STEPS, {"after": 0, "timeout_s": LONG_S})[1]))
    waits.start()
    wait_until(lambda: node.connections == 1)
    connect(node.address, "run").save(1, content(1, SIZE))
    waits.join(10)
    assert [row["step"] for row in found[0]["steps"]] == [1]


def test_a_run_of_another_key_stays_invisible_to_one_that_waits(node: MemoryNode, connect: Connect) -> None:
    reader = connect(node.address, "run", write=False)
    connect(node.address, "run", key="another").save(1, content(1, SIZE))
    assert reader.ask(Kind.STEPS, {"after": 0, "timeout_s": 0.05})[1] == {
        "steps": [], "writes_on": False, "version": 0,
    }  # fmt: skip
