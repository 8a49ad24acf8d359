"""A connection between a machine and the hub: JSON, one line each way at a time, known to each other by a token."""

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
from deepvm.memnode import wire
from deepvm.memnode.sockets import tune

MOST_LINE_BYTES = 2**20
HANDSHAKE_S = 10.0
SEND_S = 10.0  # a peer that takes nothing for so long is taken for dead
VERSION = 1


class Gone(DeepvmError):
    """The other side left, was silent for too long, or speaks otherwise."""


class Lines:
    """One thread may read, any may say."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._heard: deque[bytes] = deque()
        self._rest = b""  # of a line whose end has not come
        self._saying = threading.Lock()
        tune(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.settimeout(SEND_S)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def say(self, what: str, **fields: Any) -> None:
        line = json.dumps({"say": what, **fields}).encode() + b"\n"
        if len(line) > MOST_LINE_BYTES:
            raise Gone(f"a message {what!r} of {len(line)} bytes is too long")
        with self._saying:
            try:
                self._sock.sendall(line)
            except OSError as error:
                raise Gone(f"the other side left: {error}") from None

    def hear(self, within_s: float) -> dict[str, Any]:
        """The next message. Gone where none comes in time."""
        deadline = time.monotonic() + within_s
        while not self._heard:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise Gone(f"nothing was heard for {within_s:.0f} s")
            if len(self._rest) > MOST_LINE_BYTES:
                raise Gone("a message without an end")
            try:
                if not self._poll.poll(left_s * 1e3):
                    continue
                found = self._sock.recv(65536)
            except (OSError, ValueError) as error:
                raise Gone(f"the other side left: {error}") from None
            if not found:
                raise Gone("the other side left")
            *whole, self._rest = (self._rest + found).split(b"\n")
            self._heard.extend(whole)
        try:
            message = strict.loads(self._heard.popleft(), most_bytes=MOST_LINE_BYTES, most_values=100_000)
        except strict.MalformedJson as error:
            raise Gone(f"what was heard is not a message: {error}") from None
        if not isinstance(message, dict) or not isinstance(message.get("say"), str):
            raise Gone("what was heard is no message")
        return message

    def forget(self) -> None:
        os.close(self._sock.detach())

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._sock.close()


def greet(lines: Lines, token: str) -> dict[str, Any]:
    """The hub's side of the handshake: what the machine says of itself, once it has shown that it knows the token."""
    nonce = wire.new_nonce()
    lines.say("hub", version=VERSION, nonce=nonce)
    hello = lines.hear(HANDSHAKE_S)
    if hello["say"] != "hello" or hello.get("version") != VERSION:
        raise Gone(f"no machine of version {VERSION} speaks there")
    theirs = str(hello.get("nonce"))
    if not wire.same(str(hello.get("proof")), wire.proof(token, "machine", nonce, theirs)):
        with contextlib.suppress(Gone):
            lines.say("refused", why="the token is another")
        raise Gone("a machine without the token")
    lines.say("known", proof=wire.proof(token, "hub", nonce, theirs))
    return hello


def introduce(lines: Lines, token: str, **about: Any) -> None:
    """The machine's side."""
    greeting = lines.hear(HANDSHAKE_S)
    if greeting["say"] != "hub" or greeting.get("version") != VERSION:
        raise Gone(f"no hub of version {VERSION} answers there")
    theirs, nonce = str(greeting.get("nonce")), wire.new_nonce()
    lines.say("hello", version=VERSION, nonce=nonce, proof=wire.proof(token, "machine", theirs, nonce), **about)
    answer = lines.hear(HANDSHAKE_S)
    expected = wire.proof(token, "hub", theirs, nonce)
    if answer["say"] != "known" or not wire.same(str(answer.get("proof")), expected):
        raise AccessDenied(f"the hub does not know this machine's token: {answer.get('why', 'no hub of this run')}")
