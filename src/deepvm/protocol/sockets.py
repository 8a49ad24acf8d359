"""Set up sockets of nodes, hubs and their clients: an address in, a tuned socket out."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress

from deepvm.errors import DeepvmError, UsageError
from deepvm.protocol.addresses import split_address

HASHED_BYTES = 2**19  # moved and hashed at once: fits into the cache of a core, so that memory is read only once

LEAST_BYTES_PER_S = 125_000  # 1 Mbit/s: a frame's deadline grows with its size at this rate

_BACKLOG = 128


def listen_at(address: str) -> socket.socket:
    """Listen on ``HOST:PORT`` and nowhere else."""
    host, port = split_address(address, listen=True)
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(f"{address} is not an address of this machine: {error.strerror or error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise DeepvmError(f"cannot listen on {address}: {error.strerror or error}") from None
    return listener


def tune(sock: socket.socket) -> None:
    """Send small frames at once, and do not pace connections on loopback.

    BBR, which some systems use for all connections, times its packets to spare queues in a network. Loopback has none;
    there it halves the rate of two connections. Between machines the system's own choice stays.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if is_loopback(sock.getpeername()[0]):
        with suppress(OSError, AttributeError):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def interrupt(sock: socket.socket) -> None:
    """End all waits on a socket, from another thread; the socket's owner closes it."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def is_loopback(host: str) -> bool:
    """True if a host is this machine, by its name or its IP address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
