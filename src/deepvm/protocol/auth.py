"""How two sides that know one token meet, and know each other for the rest of a connection.

A ``Meeting`` is what both saw of its beginning: two nonces, the greeting, and the address that was dialled. All proofs
and keys are bound to it, so that nobody in between can use them elsewhere. ``Tags`` go with all that is said after it.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from deepvm.errors import UsageError
from deepvm.protocol.addresses import join_address, numeric_ip, split_address

VERSION = 2
TAG_BYTES = 16
_HEADER_BYTES = 32
Side = Literal["client", "server"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """``protocol`` is "node" or "hub"; ``greeting`` is what the server said first, byte for byte."""

    protocol: str
    server_nonce: str
    client_nonce: str
    greeting: bytes
    address: str  # IP:PORT that the client dialled

    def proof(self, token: str, side: Side) -> str:
        """That one side knows the token: for this connection and this side only."""
        return self._keyed(token.encode(), side).hex()

    def tags(self, token: str, side: Side) -> Tags:
        """What ``side`` puts on all that it sends, and expects on all that it receives."""
        keys = {one: self._keyed(token.encode(), f"{one}-tags") for one in ("client", "server")}
        return Tags(send=keys[side], receive=keys["server" if side == "client" else "client"])

    def _keyed(self, token: bytes, purpose: str) -> bytes:
        seen = hashlib.sha256(self.greeting).hexdigest()
        text = (
            f"deepvm/{VERSION}/{self.protocol}/{purpose}/{self.server_nonce}/{self.client_nonce}/{seen}/{self.address}"
        )
        return hmac.digest(token, text.encode("utf-8", "surrogatepass"), "sha256")  # some of it is another's words


class Tags:
    """Each tag counts: what is left out, repeated, changed or put elsewhere has a wrong one. For one thread."""

    size = TAG_BYTES

    def __init__(self, *, send: bytes, receive: bytes) -> None:
        self._send, self._receive = send, receive
        self._sent = self._received = 0

    def next(self, data: bytes | bytearray | memoryview) -> bytes:
        self._sent += 1
        return _tag(self._send, self._sent, data)

    def on(self, head: bytes) -> bytes:
        """A frame's header and meta, with their tag in between."""
        return head[:_HEADER_BYTES] + self.next(head) + head[_HEADER_BYTES:]

    def fits(self, data: bytes | bytearray | memoryview, tag: bytes | bytearray | memoryview) -> bool:
        self._received += 1
        return hmac.compare_digest(_tag(self._receive, self._received, data), tag)

    def skip(self, count: int) -> None:
        """Of what was thrown away unread."""
        self._received += count


class NoTags(Tags):
    """Where there is no token: a node that listens on loopback only."""

    size = 0

    def __init__(self) -> None:
        super().__init__(send=b"", receive=b"")

    def next(self, _: bytes | bytearray | memoryview) -> bytes:
        return b""

    def on(self, head: bytes) -> bytes:
        return head

    def fits(self, _: bytes | bytearray | memoryview, tag: bytes | bytearray | memoryview) -> bool:
        return not len(tag)


def _tag(key: bytes, number: int, data: bytes | bytearray | memoryview) -> bytes:
    """BLAKE2b with a key: as good as HMAC-SHA256, and a third of its time for what is short."""
    return hashlib.blake2b(number.to_bytes(8, "big") + data, key=key, digest_size=TAG_BYTES).digest()


def of_body(body: bytes | bytearray | memoryview) -> bytes:
    """What the tag of a document is taken of."""
    return hashlib.sha256(body).digest()


# --- addresses: the same text at both ends of a connection, unless somebody is in between ----------------------------


def local_address(sock: socket.socket) -> str:
    return _numeric(sock.getsockname())


def dialled_address(sock: socket.socket) -> str:
    return _numeric(sock.getpeername())


def _numeric(name: Any) -> str:
    return join_address(str(numeric_ip(name[0])), int(name[1]))


def resolve_all(addresses: Iterable[str]) -> frozenset[str]:
    """IP:PORT of every address that a server is also reached at."""
    found: set[str] = set()
    for address in addresses:
        host, port = split_address(address)
        try:
            answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise UsageError(
                f"the address {address} that is advertised is unknown: {error.strerror or error}"
            ) from None
        found.update(_numeric(answer[4]) for answer in answers)
    return frozenset(found)
