"""How both ends set up a connection between trainer and node, and in what pieces they move a chunk."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress

HASHED_BYTES = 2**19  # moved and hashed at once: fits into the cache of a core, so that memory is read only once


def tune(sock: socket.socket) -> None:
    """Small frames leave at once, and on loopback nothing paces itself.

    BBR, which some systems use for all connections, times its packets to spare queues in a network. Loopback has none;
    there it halves the rate of two connections. Between machines the system's own choice stays.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if is_loopback(sock.getpeername()[0]):
        with suppress(OSError, AttributeError):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
