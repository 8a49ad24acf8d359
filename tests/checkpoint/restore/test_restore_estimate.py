"""The estimate of a restore's time against the bytes that the busiest of its limited connections brings."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from deepvm.checkpoint import Checkpointer
from deepvm.performance import RestorePath, restore_time
from tests.support.checkpoint.processes import Work, nodes

FLOW_BYTES_PER_S = 12e6
PIECE = 64 * 1024
DEADLINE_S = 30.0


def _copy(source: socket.socket, target: socket.socket, bytes_per_s: float, brought: list[int]) -> None:
    """Until one side is closed, at the rate; a moment in which the thread was late is made up for."""
    due, number = time.monotonic(), len(brought)
    brought.append(0)
    try:
        while piece := source.recv(PIECE):
            brought[number] += len(piece)
            target.sendall(piece)
            due = max(due, time.monotonic() - 0.03) + len(piece) / bytes_per_s
            time.sleep(max(0.0, due - time.monotonic()))
        target.shutdown(socket.SHUT_WR)
    except OSError:
        return


@contextmanager
def limited(address: str, brought: list[int]) -> Iterator[str]:
    """An address before a node's that lets every connection receive only so many bytes a second, and counts them."""
    host, _, port = address.rpartition(":")
    ends: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            while True:
                try:
                    ours, _ = server.accept()
                except OSError:
                    return
                theirs = socket.create_connection((host, int(port)), timeout=DEADLINE_S)
                ends.extend((ours, theirs))
                for way in ((theirs, ours, FLOW_BYTES_PER_S, brought), (ours, theirs, math.inf, [])):
                    threading.Thread(target=_copy, args=way, daemon=True).start()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
    thread.join(DEADLINE_S)
    for end in ends:
        end.close()


@pytest.mark.parametrize(
    ("count", "connections"),
    [pytest.param(1, 2, marks=pytest.mark.chaos), pytest.param(1, 4, marks=pytest.mark.chaos), (2, 2)],
)
def test_a_restore_is_bound_by_its_busiest_connection_as_estimated(count: int, connections: int) -> None:
    work = Work()
    work.step()
    brought: list[int] = []
    with ExitStack() as stack:
        started = stack.enter_context(nodes(count))
        far = ",".join(stack.enter_context(limited(node.address, brought)) for node in started)
        url = f"memory://{far}?connections={connections}"
        with Checkpointer(work.state, url, deadline_s=DEADLINE_S) as ckpt:
            handle = ckpt.save(1)
            handle.wait("remote", DEADLINE_S)
            sent = handle.bytes_sent
        before = len(brought)
        with Checkpointer(work.state, url, deadline_s=DEADLINE_S) as ckpt:
            assert ckpt.restore() == 1
        busiest_s = max(brought[before:]) / FLOW_BYTES_PER_S
    estimate = restore_time(
        RestorePath(
            state_bytes=sent,
            worker_link_bytes_per_s=4e9,
            node_link_bytes_per_s=4e9,
            memory_nodes=count,
            connections=connections,
            flow_bytes_per_s=FLOW_BYTES_PER_S,
        )
    )
    assert estimate.bound_by == "its connections"
    # The connection that asked for the manifest brings chunks, too: three share what two are expected to bring.
    assert 0.66 < busiest_s / estimate.fetch_s < 2.0
