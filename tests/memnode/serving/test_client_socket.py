"""The node's end of one connection: bytes in pieces, interruptions of the kernel, clients that are gone or too slow."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import xxhash

from deepvm.memnode.errors import PeerGone
from deepvm.memnode.serving import socket_io
from deepvm.memnode.serving.socket_io import ClientSocket
from deepvm.protocol.sockets import HASHED_BYTES

FAR_S = 1e9


class Interrupted(socket.socket):
    """Its first calls are interrupted; the next ones move bytes."""

    interruptions = 2

    def _interrupt(self) -> None:
        if self.interruptions:
            self.interruptions -= 1
            raise BlockingIOError

    def recv_into(self, *words: Any) -> int:
        self._interrupt()
        return super().recv_into(*words)

    def send(self, *words: Any) -> int:
        self._interrupt()
        return super().send(*words)


@pytest.fixture
def ends() -> Iterator[tuple[Interrupted, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname(), timeout=20)
        accepted = listener.accept()[0]
        with client, Interrupted(fileno=accepted.detach()) as ours:
            yield ours, client


def test_interrupted_calls_lose_and_repeat_no_byte(ends: tuple[Interrupted, socket.socket]) -> None:
    ours, client = ends
    data = bytes(range(256)) * (HASHED_BYTES // 128) + b"end"
    channel = ClientSocket(ours, frame_s=60.0)
    sender = threading.Thread(target=client.sendall, args=(data + data,))
    sender.start()
    into = memoryview(bytearray(len(data)))
    assert channel.receive_hashed(into, FAR_S) == xxhash.xxh3_64_intdigest(data)
    assert bytes(into) == data
    ours.interruptions = 1
    channel.discard(len(data) - 3, FAR_S)
    channel.receive(into[:3], FAR_S)
    assert bytes(into[:3]) == b"end"
    sender.join()
    assert channel.received_bytes == 2 * len(data)
    ours.interruptions = 2
    channel.send(b"abc", b"", b"defg")
    assert client.recv(7, socket.MSG_WAITALL) == b"abcdefg"
    assert channel.sent_bytes == 7


def test_a_client_that_takes_no_answer_or_is_gone_is_let_go(
    ends: tuple[Interrupted, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, client = ends
    monkeypatch.setattr(socket_io, "_TICK_S", 0.01)
    monkeypatch.setattr(socket_io, "LEAST_BYTES_PER_S", 1e12)
    channel = ClientSocket(ours, frame_s=0.0)
    assert channel.is_gone() is False
    with pytest.raises(PeerGone, match="the client receives its answer too slowly"):
        channel.send(bytes(2**26))
    client.close()
    assert channel.is_gone() is True
    channel.close()
    assert channel.is_gone() is True
    with pytest.raises(PeerGone, match="the connection broke"):
        channel.receive(memoryview(bytearray(1)), FAR_S)
