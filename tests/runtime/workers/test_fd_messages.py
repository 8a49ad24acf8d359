"""Messages with descriptors: whole or not at all, and no descriptor is left open."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepvm.runtime.workers.fd_messages import MOST_BYTES, receive, send


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_messages_come_whole_with_their_descriptors(pair: tuple[socket.socket, socket.socket], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content")
    large = {"x": "y" * 300_000}
    with (tmp_path / "file").open("rb") as file:
        thread = threading.Thread(target=lambda: (send(pair[0], large, [file.fileno()]), send(pair[0], {"b": 1})))
        thread.start()
        found = receive(pair[1], 3)
        assert found is not None
        message, (descriptor,) = found
        assert receive(pair[1]) == ({"b": 1}, [])
        thread.join(20)
    assert message == large
    with os.fdopen(descriptor) as copy:
        assert copy.read() == "content"


@pytest.mark.parametrize("data", [b"", b"\0\0", b"\0\0\0\5ab"])
def test_a_message_that_is_cut_off_is_none(pair: tuple[socket.socket, socket.socket], data: bytes) -> None:
    before = open_descriptors()
    with open(os.devnull, "rb") as file:
        if data:
            socket.send_fds(pair[0], [data], [file.fileno()])
        pair[0].shutdown(socket.SHUT_WR)
        assert receive(pair[1], 3) is None
    assert open_descriptors() == before


def test_a_message_that_is_too_long_is_refused_before_it_is_read(pair: tuple[socket.socket, socket.socket]) -> None:
    before = open_descriptors()
    with open(os.devnull, "rb") as file:
        socket.send_fds(pair[0], [(MOST_BYTES + 1).to_bytes(4, "big")], [file.fileno()])
        with pytest.raises(ValueError, match=f"a message of {MOST_BYTES + 1} bytes: at most {MOST_BYTES} are allowed"):
            receive(pair[1], 3)
    assert open_descriptors() == before
