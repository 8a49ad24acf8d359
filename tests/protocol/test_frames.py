"""Frames at the limits of their fields, errors over the wire, and proofs that hide what they prove."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack
from typing import Any

import pytest

from deepvm.errors import AccessDenied, Corrupt, DeepvmError, NotFound, StoreError, StoreUnavailable, UsageError
from deepvm.protocol import acceptor, frames
from deepvm.protocol.frames import HEADER, MAGIC, MOST_META_BYTES, Kind, ProtocolError
from deepvm.protocol.sockets import listen_at
from tests.support.waiting import wait_until


def test_a_frame_comes_back_with_every_field() -> None:
    head = frames.encode(Kind.DATA, 2**32 + 7, {"step": 1}, 5, 2**64 - 1)
    frame = frames.decode_header(head[: HEADER.size])
    assert frame == frames.Frame(Kind.DATA, 7, len(b'{"step":1}'), 5, 2**64 - 1)
    assert frames.decode_meta(head[HEADER.size :]) == {"step": 1}
    assert frames.encode(Kind.OK) == HEADER.pack(MAGIC, Kind.OK, 0, 0, 0, 0, 0, 0)
    assert frames.decode_meta(b"") == {}


def test_meta_has_a_limit_on_both_sides() -> None:
    room = MOST_META_BYTES - len(b'{"a":""}')
    head = frames.encode(Kind.OK, 1, {"a": "x" * room})
    assert frames.decode_header(head[: HEADER.size]).meta_bytes == MOST_META_BYTES
    with pytest.raises(ProtocolError, match=f"meta of {MOST_META_BYTES + 1} bytes, the limit is {MOST_META_BYTES}"):
        frames.encode(Kind.OK, 1, {"a": "x" * (room + 1)})
    with pytest.raises(ProtocolError, match=f"meta of {MOST_META_BYTES + 1} bytes"):
        frames.decode_header(HEADER.pack(MAGIC, Kind.OK, 0, 0, 1, MOST_META_BYTES + 1, 0, 0))


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (b"", "cut off"),
        (bytes(HEADER.size - 1), "cut off"),
        (HEADER.pack(b"XXXX"[: len(MAGIC)], Kind.OK, 0, 0, 1, 0, 0, 0), "not the protocol"),
        (HEADER.pack(MAGIC, 250, 0, 0, 1, 0, 0, 0), "unknown kind 250"),
        (HEADER.pack(MAGIC, Kind.OK, 1, 0, 1, 0, 0, 0), "or flags 1"),
        (HEADER.pack(MAGIC, Kind.OK, 0, 1, 1, 0, 0, 0), "unknown kind"),
        (HEADER.pack(MAGIC, Kind.OK, 0, 0, 1, 0, 1, 0), "OK with a body of 1 bytes, the limit is 0"),
        (HEADER.pack(MAGIC, Kind.DATA, 0, 0, 1, 0, 2**40, 0), "DATA with a body of"),
    ],
)
def test_headers_that_cannot_be_are_refused(header: bytes, problem: str) -> None:
    with pytest.raises(ProtocolError, match=problem):
        frames.decode_header(header)


@pytest.mark.parametrize("kind", list(Kind))
def test_each_kind_has_its_longest_body(kind: Kind) -> None:
    most = frames._MOST_BODY_BYTES.get(kind, 0)
    assert frames.decode_header(HEADER.pack(MAGIC, kind, 0, 0, 1, 0, most, 0)).body_bytes == most
    with pytest.raises(ProtocolError, match=f"the limit is {most}"):
        frames.decode_header(HEADER.pack(MAGIC, kind, 0, 0, 1, 0, most + 1, 0))


@pytest.mark.parametrize("data", [b"[]", b"{", b'{"a": 1e999}', b"\xff"])
def test_meta_that_is_no_object_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="a frame's meta cannot be read"):
        frames.decode_meta(data)


def test_numbers_are_little_endian() -> None:
    assert frames.pack("I", [1, 2**32 - 1]) == b"\1\0\0\0\xff\xff\xff\xff"
    assert frames.pack("Q", [258]) == b"\2\1\0\0\0\0\0\0"
    assert list(frames.unpack("Q", b"\2\1\0\0\0\0\0\0")) == [258]
    with pytest.raises(ProtocolError, match="7 bytes, which is not a multiple of 4"):
        frames.unpack("I", bytes(7))


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("denied", AccessDenied), ("fenced", AccessDenied), ("not-found", NotFound), ("corrupt", Corrupt),
        ("no-room", StoreUnavailable), ("busy", StoreUnavailable), ("stopping", StoreUnavailable),
        ("malformed", ProtocolError), ("failed", StoreError), ("new in a later version", StoreError),
    ],
)  # fmt: skip
def test_an_error_is_raised_as_what_its_code_says(code: str, kind: type[Exception]) -> None:
    with pytest.raises(StoreError, match="why") as caught:
        frames.raise_error({"code": code, "message": "why"})
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("meta", "shown"),
    [
        ({"code": "busy", "message": "a\x1b[2Jb"}, "a?[2Jb"),
        ({"code": "busy", "message": "x" * 2000}, "x" * 1000),
        ({"code": "busy", "message": " "}, "refused without a reason"),
        ({"code": "busy", "message": 5}, "refused without a reason"),
        ({}, "refused without a reason"),
    ],
)
def test_messages_are_short_and_cannot_control_a_terminal(meta: dict[str, Any], shown: str) -> None:
    with pytest.raises(StoreError) as caught:
        frames.raise_error(meta)
    assert str(caught.value).startswith(shown)
    assert len(str(caught.value)) <= 1000
    assert frames.error_meta("busy", "x" * 2000) == {"code": "busy", "message": "x" * 1000}


def test_a_verifier_is_hidden_by_the_token_and_by_nothing_without_one() -> None:
    verifier, nonces = frames.run_verifier("run", "key"), ("a" * 64, "b" * 64)
    hidden = frames.masked(verifier, "token", *nonces)
    assert hidden != verifier
    assert frames.masked(hidden, "token", *nonces) == verifier
    assert frames.masked(hidden, "other", *nonces) != verifier
    assert frames.masked(verifier, None, *nonces) == verifier
    assert frames.same("ü", "ü")
    assert not frames.same("a", "b")
    assert len(frames.new_nonce()) == 64
    assert frames.new_nonce() != frames.new_nonce()
    assert len(frames.fingerprint("secret")) == 8


def test_proofs_of_content_are_of_all_pieces_and_of_one_connection() -> None:
    key, other = frames.content_key("a", "b"), frames.content_key("a", "c")
    whole = frames.content_proof(key, [memoryview(b"abcd")])
    assert whole == frames.content_proof(key, [memoryview(b"ab"), memoryview(b"cd")])
    assert whole != frames.content_proof(other, [memoryview(b"abcd")])
    assert whole != frames.content_proof(key, [memoryview(b"abce")])


def test_an_address_of_another_machine_is_refused_to_listen_at() -> None:
    with pytest.raises(UsageError, match="is not an address of this machine"):
        listen_at("no-such-host.invalid:0")
    with pytest.raises(DeepvmError, match=r"cannot listen on 192\.0\.2\.1:0"):
        listen_at("192.0.2.1:0")
    listener = listen_at("127.0.0.1:0")
    with pytest.raises(DeepvmError, match="cannot listen on"):
        listen_at(f"127.0.0.1:{listener.getsockname()[1]}")
    listener.close()


def test_a_port_can_be_listened_on_again_right_after_its_connections_have_closed() -> None:
    """A node that restarts must not wait until the system forgets its old connections."""
    listener = listen_at("127.0.0.1:0")
    address = listener.getsockname()
    with socket.create_connection(address) as client:
        accepted, _ = listener.accept()
        accepted.close()  # this side closes first, and keeps the port for a minute
        client.recv(1)
    listener.close()
    listen_at(f"127.0.0.1:{address[1]}").close()


def test_a_connection_without_a_thread_leaves_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[Exception] = []
    found = acceptor.Acceptor(
        "127.0.0.1:0", lambda peer: None, connections=1, connections_of_a_host=1, dropped=lambda *_: None,
        failed=failed.append,
    )  # fmt: skip
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("deepvm-127"):
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    found.start()
    host, port = found.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=10) as client:
        assert client.recv(1) == b""
    wait_until(lambda: failed, "the report")
    assert len(found) == 0
    found.stop()


def test_a_connection_that_cannot_be_served_is_reported_and_leaves_its_place() -> None:
    failed: list[Exception] = []

    def serve(peer: acceptor.Peer) -> None:
        raise MemoryError("no room")

    found = acceptor.Acceptor(
        "127.0.0.1:0", serve, connections=1, connections_of_a_host=1, dropped=lambda *_: None, failed=failed.append
    )
    found.start()
    host, port = found.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=10) as client:
        assert client.recv(1) == b""
    wait_until(lambda: not len(found), "the end of its place")
    assert [str(each) for each in failed] == ["no room"]
    found.stop()


def test_places_of_strangers_are_64_and_the_oldest_of_the_busiest_host_goes() -> None:
    dropped: list[tuple[str, str]] = []
    found = acceptor.Acceptor(
        "127.0.0.1:0", lambda peer: None, connections=1, connections_of_a_host=1,
        dropped=lambda peer, reason: dropped.append((peer.name, reason)), failed=lambda error: None,
    )  # fmt: skip
    with ExitStack() as stack:
        stack.callback(found.stop)

        def enter(host: str, port: int) -> acceptor.Peer:
            return found.enter(stack.enter_context(socket.socket()), (host, port))

        peers = [enter(f"10.0.0.{2 if port in (5, 6) else 100 + port}", port) for port in range(1, 65)]
        assert (len(found), dropped) == (64, [])
        enter("10.0.0.1", 1)
        assert dropped == [("10.0.0.2:5", acceptor.TOO_MANY_HANDSHAKES)]
        assert [peer.name for peer in peers if peer.dropped] == ["10.0.0.2:5"]
        assert len(found) == 64
        assert "too many connections" in str(found.admit(peers[4]))
        assert found.admit(peers[5]) is None
        assert len(found) == 64
