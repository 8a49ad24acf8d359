"""Messages between a template and its owner: JSON after its length, with descriptors beside the length."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from typing import Any

MOST_BYTES = 2**26  # far more than an environment and an argument list need
_LENGTH_BYTES = 4


def send(connection: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    body = json.dumps(message).encode()
    length = len(body).to_bytes(_LENGTH_BYTES, "big")
    if descriptors:
        sent = socket.send_fds(connection, [length], list(descriptors))
        connection.sendall(length[sent:] + body)
    else:
        connection.sendall(length + body)


def receive(connection: socket.socket, most_descriptors: int = 0) -> tuple[dict[str, Any], list[int]] | None:
    """Return the next message and its descriptors; None if the other side has closed."""
    length, descriptors = b"", []
    while len(length) < _LENGTH_BYTES:
        if most_descriptors:
            got, found, _, _ = socket.recv_fds(connection, _LENGTH_BYTES - len(length), most_descriptors)
            descriptors += found
        else:
            got = connection.recv(_LENGTH_BYTES - len(length))
        if not got:
            _close(descriptors)
            return None
        length += got
    wanted = int.from_bytes(length, "big")
    if wanted > MOST_BYTES:
        _close(descriptors)
        raise ValueError(f"a message of {wanted} bytes: at most {MOST_BYTES} are allowed")
    body = bytearray()
    while len(body) < wanted:
        got = connection.recv(min(wanted - len(body), 2**16))
        if not got:
            _close(descriptors)
            return None
        body += got
    message: dict[str, Any] = json.loads(body)
    return message, descriptors


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
