"""Somebody in between, who does not know the token, gains nothing by passing on what others prove."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from deepvm.errors import AccessDenied, UsageError
from deepvm.memnode import MemoryNode
from deepvm.protocol import frames
from deepvm.protocol.frames import HEADER, Kind, ProtocolError
from deepvm.store.memory.connection import Connection
from tests.support.memnode.client import Client, content
from tests.support.memnode.intermediary import Harm, Middle
from tests.support.waiting import wait_until

SIZE = 3 * 2**16 + 5
StartNode = Callable[..., MemoryNode]


@contextmanager
def harmed(start_node: StartNode, harm: Harm | None) -> Iterator[tuple[MemoryNode, Middle]]:
    """A node that is reached through a forwarded port, and knows it; where the port is forwarded, harm is done."""
    with Middle(harm=harm) as middle:
        node = start_node(token="t", advertise=(middle.address,))
        middle.target = node.address
        yield node, middle


def test_a_handshake_that_is_relayed_from_another_address_is_refused(start_node: StartNode) -> None:
    node = start_node(token="t")
    with Middle(node.address) as middle, pytest.raises(AccessDenied) as refused:
        Connection.connect(middle.address, token="t")
    assert f"dialled {middle.address}" in str(refused.value)
    assert f"--advertise {middle.address}" in str(refused.value)
    assert node.counters.failed_logins == 1


def test_a_forwarded_port_works_where_the_node_advertises_it(start_node: StartNode, connect: Any) -> None:
    with harmed(start_node, None) as (_, middle):
        client = connect(middle.address, "run", token="t")
        client.save(1, content(1, SIZE))
        assert client.read(1) == content(1, SIZE)


def test_an_advertised_name_that_nobody_knows_is_a_sentence(start_node: StartNode) -> None:
    with pytest.raises(UsageError, match=r"no-such-host\.invalid:1 cannot be resolved"):
        start_node(token="t", advertise=("no-such-host.invalid:1",))


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0"])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2"])
def test_a_node_on_all_interfaces_is_known_by_each_of_its_addresses(
    start_node: StartNode, listen: str, host: str
) -> None:
    port = start_node(token="t", listen=listen).address.rpartition(":")[2]
    with closing(Connection.connect(f"{host}:{port}", token="t")) as connection:
        assert connection.call(Kind.STATUS)[0]["connections"] == 1


def test_whoever_relayed_a_handshake_cannot_speak_for_the_client(start_node: StartNode) -> None:
    """Somebody passes the handshake on, and then says what he likes."""

    def take_over(number: int, head: bytes) -> bytes:
        return head if number == 0 else frames.encode(Kind.STATUS, 1) + bytes(16)

    with (
        harmed(start_node, take_over) as (node, middle),
        closing(Connection.connect(middle.address, token="t")) as connection,
        pytest.raises(ProtocolError, match="tag is wrong"),
    ):
        connection.call(Kind.RUNS)
    assert node.counters.malformed_frames == 1


def changed_meta(number: int, head: bytes) -> bytes:
    return head.replace(b'"step":7', b'"step":8') if number else head


def flipped_tag(number: int, head: bytes) -> bytes:
    return head if number < 2 else head[:40] + bytes([head[40] ^ 1]) + head[41:]


def changed_request(number: int, head: bytes) -> bytes:
    return head if number < 2 else head[:11] + bytes([head[11] ^ 1]) + head[12:]


def left_out(number: int, head: bytes) -> bytes:
    return b"" if number == 2 else head


def repeated(number: int, head: bytes) -> bytes:
    return head + head if number == 2 else head


@pytest.mark.parametrize("harm", [changed_meta, flipped_tag, changed_request, left_out, repeated])
def test_a_frame_that_was_changed_left_out_or_repeated_ends_the_connection(
    start_node: StartNode, connect: Any, harm: Harm
) -> None:
    with harmed(start_node, harm) as (node, middle):
        client = connect(middle.address, token="t")
        client.send(b"".join(client.head_of(Kind.STATUS, {"step": 7}) for _ in range(4)))
        answers = 0
        while (answer := client.answer())[0] is Kind.OK:
            answers += 1
        with pytest.raises(ProtocolError, match="tag is wrong"):
            frames.raise_error(answer[1])
        assert answers < 4
        assert node.counters.malformed_frames == 1


def test_an_answer_that_was_changed_is_not_believed(start_node: StartNode) -> None:
    """A node that knows the token, and somebody who changes what it answers."""
    with Middle() as middle:
        node = start_node(token="t", advertise=(middle.address,))
        middle.target = node.address
        middle.change_answers = lambda piece: piece.replace(b'"runs":["run"]', b'"runs":["nut"]')
        with closing(Connection.connect(node.address, token="t")) as direct:
            direct.open("run", session="s", write=True)
        client = Client(node.address, "run", token="t", key="")
        client.save(1, content(1, SIZE))
        client.close()
        with (
            closing(Connection.connect(middle.address, token="t")) as connection,
            pytest.raises(ProtocolError, match="tag"),
        ):
            connection.call(Kind.RUNS)


def test_a_document_that_was_changed_is_refused_though_its_digest_fits(start_node: StartNode, connect: Any) -> None:
    """xxh3 is easily satisfied; the tag is not."""
    node = start_node(token="t")
    client = connect(node.address, "run", token="t")
    client.begin(1, SIZE)
    body = b'{"a": 1}'
    client.send_document(Kind.EXTRA, {"step": 1, "rank": 0}, body, tagged=b'{"a": 2}')
    with pytest.raises(ProtocolError, match="tag"):
        frames.raise_error(client.answer()[1])


def test_a_chunk_of_several_whose_digest_was_changed_is_refused(start_node: StartNode, connect: Any) -> None:
    node = start_node(token="t")
    client = connect(node.address, "run", token="t")
    client.begin(1, SIZE)
    other = b"y" * 2**16
    with pytest.raises(ProtocolError, match="tag"):
        client.puts(1, {0: other}, tagged={0: 4711})
    wait_until(lambda: node.connections == 0)
    assert node.arena.used == 0


def test_what_was_recorded_opens_nothing_later(start_node: StartNode) -> None:
    recorded: list[bytes] = []

    def record(_: int, head: bytes) -> bytes:
        recorded.append(head)
        return head

    with harmed(start_node, record) as (node, middle):
        with closing(Connection.connect(middle.address, token="t")) as connection:
            connection.call(Kind.STATUS)
        host, _, port = node.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=10) as sock:
            hello = frames.decode_header(sock.recv(HEADER.size, socket.MSG_WAITALL))
            sock.recv(hello.meta_bytes, socket.MSG_WAITALL)
            sock.sendall(recorded[0])
            answer = b""
            while piece := sock.recv(65536):
                answer += piece
    assert b'"denied"' in answer
    assert node.counters.failed_logins == 1
