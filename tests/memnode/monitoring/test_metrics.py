"""The metrics port, which needs no token: what strangers can take of it."""

from __future__ import annotations

import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from deepvm.errors import DeepvmError
from deepvm.memnode import MemoryNode
from deepvm.memnode.monitoring import metrics
from deepvm.memnode.monitoring.metrics import MetricsServer
from deepvm.protocol.addresses import split_address
from tests.support.waiting import wait_until


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    found = MetricsServer("127.0.0.1:0", lambda: {"stopping": False, "runs": 3})
    found.start()
    yield found
    found.close()


def threads() -> int:
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


def test_strangers_that_hold_connections_open_keep_no_scraper_out_and_take_few_places(server: MetricsServer) -> None:
    with ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(socket.create_connection(split_address(server.address), timeout=10)).sendall(b"G")
        assert threads() <= 2 * metrics._CONNECTIONS
        with urllib.request.urlopen(f"http://{server.address}/metrics", timeout=10) as answer:
            assert b"deepvm_memory_node_runs 3" in answer.read()


def test_a_port_in_use_is_reported_and_a_closed_one_is_free_again(server: MetricsServer) -> None:
    with pytest.raises(DeepvmError, match=f"metrics cannot be served on {server.address}: Address already in use"):
        MetricsServer(server.address, dict)
    server.close()
    other = MetricsServer(server.address, dict)
    other.close()  # though it never started
    node = MemoryNode(capacity_bytes=2**20, block_bytes=2**16, metrics=server.address)
    node.start()
    with pytest.raises(DeepvmError, match="Address already in use"):
        MetricsServer(server.address, dict)
    node.stop()
    MetricsServer(server.address, dict).close()


def test_while_dropped_connections_take_all_places_a_new_one_is_closed_at_once(server: MetricsServer) -> None:
    inside = server._server
    inside._dropped.update(range(metrics._CONNECTIONS))  # type: ignore[arg-type]
    with socket.create_connection(split_address(server.address), timeout=10) as stranger:
        assert stranger.recv(1) == b""
    inside._dropped.clear()
    with urllib.request.urlopen(f"http://{server.address}/healthz", timeout=10) as answer:
        assert answer.read() == b"ok\n"


def test_a_connection_has_one_deadline_however_it_drips(server: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_TIMEOUT_S", 0.3)
    with socket.create_connection(split_address(server.address), timeout=10) as stranger:
        stranger.settimeout(0.02)

        def ended() -> bool:
            try:
                stranger.sendall(b"x")
                return stranger.recv(1) == b""
            except TimeoutError:
                return False
            except OSError:
                return True

        wait_until(ended, "the end of the connection")
    wait_until(lambda: threads() == 0, "the end of its thread")
