"""A socket -> messages between a machine and the hub: JSON, one a line, both sides authenticated by a token.

After the handshake, every line begins with a tag (protocol/handshake.py) in hexadecimal and a space.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import threading
import time
from collections import deque
from typing import Any

from deepvm import strict_json as strict
from deepvm.errors import AccessDenied, DeepvmError
from deepvm.protocol import frames
from deepvm.protocol.handshake import Handshake, Tags, dialled_address, local_address
from deepvm.protocol.sockets import tune
from deepvm.runtime.line_buffer import LineBuffer

MOST_MESSAGE_BYTES = 2**20
MOST_LINE_BYTES = MOST_MESSAGE_BYTES + 64  # with its tag
STRANGERS_LINE_BYTES = 4096  # before the token is shown
HANDSHAKE_S = 10.0  # in all
SEND_S = 10.0  # a peer that receives nothing for longer counts as dead
VERSION = frames.VERSION


class HubGone(DeepvmError):
    """The other side closed the connection, was silent for too long, or sent something invalid."""


class Lines:
    """One thread may receive, any may send."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._received: deque[bytes] = deque()
        self._lines = LineBuffer()
        self._send_lock = threading.Lock()
        self._most_bytes = STRANGERS_LINE_BYTES
        self._tags = Tags()  # empty until both have proven the token
        self.last = b""  # the last message received, as it was sent
        self.local_address, self.dialled_address = local_address(sock), dialled_address(sock)
        tune(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.settimeout(SEND_S)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def protect(self, tags: Tags) -> None:
        """Tag and verify all further messages, in both directions."""
        self._tags, self._most_bytes = tags, MOST_LINE_BYTES

    def send(self, what: str, **fields: Any) -> bytes:
        """Send a message and return its bytes."""
        message = json.dumps({"say": what, **fields}).encode()
        if len(message) > MOST_MESSAGE_BYTES:
            raise HubGone(f"a message {what!r} of {len(message)} bytes is too long")
        with self._send_lock:
            tag = self._tags.next(message)
            try:
                self._sock.sendall((tag.hex().encode() + b" " if tag else b"") + message + b"\n")
            except OSError as error:
                raise HubGone(f"the other side left: {error}") from None
        return message

    def receive(self, within_s: float) -> dict[str, Any]:
        """Return the next message. Raise HubGone if none arrives in time."""
        deadline = time.monotonic() + within_s
        while not self._received:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise HubGone(f"no message for {within_s:.0f} s")
            if len(self._lines.rest) > self._most_bytes:
                raise HubGone(f"a message of more than {self._most_bytes} bytes")
            try:
                if not self._poll.poll(left_s * 1e3):
                    continue
                found = self._sock.recv(min(65536, self._most_bytes))
            except (OSError, ValueError) as error:
                raise HubGone(f"the other side left: {error}") from None
            if not found:
                raise HubGone("the other side left")
            self._received.extend(self._lines.feed(found))
        self.last = self._untagged(self._received.popleft())
        try:
            message = strict.loads(self.last, most_bytes=MOST_LINE_BYTES, most_values=100_000)
        except strict.MalformedJson as error:
            raise HubGone(f"not a valid message: {error}") from None
        if not isinstance(message, dict) or not isinstance(message.get("say"), str):
            raise HubGone("not a valid message: 'say' is missing")
        return message

    def _untagged(self, line: bytes) -> bytes:
        if not self._tags.size:
            return line
        digits = 2 * self._tags.size
        try:
            tag = bytes.fromhex(line[:digits].decode("ascii"))
        except ValueError:
            tag = b""
        message = line[digits + 1 :]
        if not self._tags.fits(message, tag):
            raise HubGone("wrong tag: messages were changed, added or dropped on the way")
        return message

    def forget(self) -> None:
        os.close(self._sock.detach())

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._sock.close()


def accept_handshake(lines: Lines, token: str) -> dict[str, Any]:
    """Run the hub's side of the handshake. Return what the machine sent about itself, after it proved the token."""
    nonce, until_s = frames.new_nonce(), time.monotonic() + HANDSHAKE_S
    greeting = lines.send("hub", version=VERSION, nonce=nonce)
    hello = lines.receive(HANDSHAKE_S)
    if hello["say"] != "hello" or hello.get("version") != VERSION:
        raise HubGone(f"the peer is not a machine of version {VERSION}")
    handshake = Handshake(
        protocol="hub", server_nonce=nonce, client_nonce=str(hello.get("nonce")), greeting=greeting,
        address=str(hello.get("address")),
    )  # fmt: skip
    if not frames.same(str(hello.get("proof")), handshake.proof(token, "client")):
        raise _refused(lines, "wrong token")
    if handshake.address != lines.local_address:
        why = f"the machine dialled {handshake.address}, but the hub is at {lines.local_address}: a relay is in between"
        raise _refused(lines, why)
    lines.send("known", proof=handshake.proof(token, "server"))
    lines.protect(handshake.tags(token, "server"))
    return lines.receive(max(0.0, until_s - time.monotonic()))


def _refused(lines: Lines, why: str) -> HubGone:
    with contextlib.suppress(HubGone):
        lines.send("refused", why=why)
    return HubGone(why)


def connect_handshake(lines: Lines, token: str, **about: Any) -> None:
    """Run the machine's side of the handshake."""
    greeting = lines.receive(HANDSHAKE_S)
    if greeting["say"] != "hub" or greeting.get("version") != VERSION:
        raise HubGone(f"the peer is not a hub of version {VERSION}")
    handshake = Handshake(
        protocol="hub", server_nonce=str(greeting.get("nonce")), client_nonce=frames.new_nonce(), greeting=lines.last,
        address=lines.dialled_address,
    )  # fmt: skip
    proof = handshake.proof(token, "client")
    lines.send("hello", version=VERSION, nonce=handshake.client_nonce, address=handshake.address, proof=proof)
    answer = lines.receive(HANDSHAKE_S)
    if answer["say"] == "refused":
        raise AccessDenied(f"the hub refuses this machine: {str(answer.get('why'))[:300]!a}")
    if answer["say"] != "known" or not frames.same(str(answer.get("proof")), handshake.proof(token, "server")):
        raise AccessDenied("the hub does not know this machine's token: it is not the hub of this run")
    lines.protect(handshake.tags(token, "client"))
    lines.send("about", **about)
