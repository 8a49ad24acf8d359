"""Memory nodes and their clients as fixtures of every test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from deepvm.memnode import Limits, MemoryNode
from tests.support.memnode.client import BLOCK, Client


@pytest.fixture
def start_node() -> Iterator[Callable[..., MemoryNode]]:
    """Nodes in this process, stopped at the end; nothing may be left in their memory that no checkpoint holds."""
    nodes: list[MemoryNode] = []

    def start(**fields: Any) -> MemoryNode:
        limits = {"stop_s": 0.0, "failure_delay_s": 0.01, "room_s": 0.1, **fields.pop("limits", {})}
        fields = {"capacity_bytes": 64 * BLOCK, "block_bytes": BLOCK, "limits": Limits(**limits), **fields}
        node = MemoryNode(log=fields.pop("log", None), **fields)
        nodes.append(node)
        node.start()
        return node

    yield start
    for node in nodes:
        node.stop()


@pytest.fixture
def node(start_node: Callable[..., MemoryNode]) -> MemoryNode:
    return start_node()


@pytest.fixture
def connect() -> Iterator[Callable[..., Client]]:
    clients: list[Client] = []

    def make(*words: Any, **fields: Any) -> Client:
        client = Client(*words, **fields)
        clients.append(client)
        return client

    yield make
    for client in clients:
        client.close()
