"""A node keeps listening, whatever happens to one connection."""

from __future__ import annotations

import resource
import socket
from contextlib import ExitStack
from pathlib import Path

from deepvm.store.memory.store import MemoryStore
from tests.support.memnode.client import NodeProcess
from tests.support.waiting import wait_until


def limit_memory(pid: int, size_bytes: int) -> None:
    """No mapping above that size, stacks of threads included; root is bound by it, too."""
    resource.prlimit(pid, resource.RLIMIT_AS, (size_bytes, resource.RLIM_INFINITY))


def test_a_node_that_could_start_no_thread_accepts_the_next_client(tmp_path: Path) -> None:
    with NodeProcess(tmp_path) as node, ExitStack() as stack:
        host, _, port = node.address.rpartition(":")
        limit_memory(node.process.pid, 2**20)
        for _ in range(20):  # some find a stack that another thread left behind
            stack.enter_context(socket.create_connection((host, int(port)), timeout=5))
        wait_until(lambda: any("can't start new thread" in str(event.get("error")) for event in node.events()))
        limit_memory(node.process.pid, resource.RLIM_INFINITY)
        store = MemoryStore([node.address])
        try:
            assert store.status(node.address)["connections"] >= 1
        finally:
            store.close()
        stack.close()
        assert node.process.poll() is None
