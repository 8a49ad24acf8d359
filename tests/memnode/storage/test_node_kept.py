"""What a node keeps beside the blocks is charged by the memory that it takes, and has limits."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from deepvm.errors import StoreError, StoreUnavailable
from deepvm.protocol.frames import Kind
from tests.support.memnode.client import BLOCK, Client, NodeProcess, content, manifest_of
from tests.support.waiting import wait_until

SIZE = 3 * BLOCK + 100


def test_documents_take_no_more_memory_than_the_node_says(tmp_path: Path) -> None:
    """One emoji makes a string take four bytes a character once it is parsed, beside the document itself."""
    text = "x" * (4 * 2**20 - 2000) + "\U0001f600"
    with NodeProcess(tmp_path, "--spill", str(tmp_path), capacity="64MiB") as node:
        before = node.figures()["VmRSS"]
        with pytest.raises(StoreUnavailable, match="documents take"):
            save_until_refused(node, text)
        with Client(node.address, "run-0", timeout_s=30) as client:
            kept = client.status()["documents_bytes"]
            assert client.manifest(1).facts == {"a": text}
        assert kept > 32 * 2**20
        grown = (node.figures()["VmRSS"] - before) * 1024
        assert grown < kept + 160 * 2**20  # parsing and spilling take some
    with (
        NodeProcess(tmp_path, "--spill", str(tmp_path), capacity="64MiB") as node,
        Client(node.address, "run-0", session="s2", timeout_s=30) as client,
    ):
        assert client.manifest(1).facts == {"a": text}, "it was written with its facts"
        assert client.read(1) == content(0, 1000)


def save_until_refused(node: NodeProcess, text: str) -> None:
    for number in range(20):
        with Client(node.address, f"run-{number}", timeout_s=30) as client:
            data = content(number, 1000)
            client.begin(1, len(data))
            client.put(1, 0, data)
            document = manifest_of(data, client.run, 1, facts={"a": "?"}).to_bytes()
            client.ask(Kind.PUBLISH, {"step": 1}, document.replace(b"?", text.encode()))
            wait_until(partial(_spilled, client))


def _spilled(client: Client) -> bool:
    return client.steps() == {1: "spilled"}


def test_the_smallest_state_is_charged_what_it_takes(start_node: Any, connect: Any) -> None:
    node = start_node()
    client = connect(node.address, "run")
    client.begin(1, SIZE, world_size=1000)
    for rank in range(1000):
        client.ask(Kind.EXTRA, {"step": 1, "rank": rank}, b"0")
    client.ask(Kind.EXTRA, {"step": 1, "rank": 0}, b"1")  # in place of its first
    assert 115_000 <= node.kept.used_bytes <= 200_000
    client.ask(Kind.ABORT, {"step": 1})
    assert node.kept.used_bytes == 0


def test_uploads_that_gave_way_are_remembered_up_to_a_limit(start_node: Any, connect: Any) -> None:
    node = start_node()
    client = connect(node.address, "run")
    for step in range(600):
        client.begin(step, SIZE)
    run = node.runs.find("run")
    assert len(run._superseded) <= 256
    with pytest.raises(StoreError, match="was not finished before step 599 began"):
        client.begin(598, SIZE)
