"""The metrics port, which needs no token: what strangers can take of it."""

from __future__ import annotations

import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

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
