"""Sockets of nodes, hubs and their clients: how connections are accepted and set up, in what pieces chunks move."""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from deepvm.errors import DeepvmError, UsageError
from deepvm.protocol.addresses import split_address

HASHED_BYTES = 2**19  # moved and hashed at once: fits into the cache of a core, so that memory is read only once

_BACKLOG = 128
ACCEPT_S = 0.5  # how often an idle listener checks whether it should stop
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 1.0


def listen_at(address: str) -> socket.socket:
    """Listen on ``HOST:PORT`` and nowhere else."""
    host, port = split_address(address, listen=True)
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(f"{address} is not an address of this machine: {error.strerror or error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise DeepvmError(f"cannot listen on {address}: {error.strerror or error}") from None
    return listener


def accept_each(
    listener: socket.socket,
    serve: Callable[[socket.socket, Any], None],
    *,
    stopping: Callable[[], bool],
    failed: Callable[[Exception], None],
) -> None:
    """Accept connections until ``stopping``; ``serve`` starts a thread for each.

    No failure ends this loop. Out of descriptors, threads or memory, it closes the connection, reports to ``failed``
    and continues after a pause, which doubles while failures follow each other.
    """
    try:
        listener.settimeout(ACCEPT_S)
    except OSError:  # closed before this thread began
        return
    pause_s = _FIRST_PAUSE_S
    while not stopping():
        sock: socket.socket | None = None
        try:
            sock, address = listener.accept()
            serve(sock, address)
            pause_s = _FIRST_PAUSE_S
        except TimeoutError:
            continue
        except Exception as error:  # it concerns one connection: the next may succeed
            if sock is not None:
                sock.close()
            if stopping():
                return
            failed(error)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


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
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
