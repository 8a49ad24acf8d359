"""Who may be connected: clients that have shown the token have places of their own, strangers cannot take them.

A connection waits among the strangers until its handshake is over. There are few of these places: where they are
taken, the oldest stranger of the host that has most of them makes way. So a client that answers at once gets in,
however many connections are held open beside it. Of the places for clients, one host may have most, but not all.
"""

from __future__ import annotations

import socket
import threading
from collections import Counter

from deepvm.memnode.settings import Limits
from deepvm.protocol.sockets import interrupt


class AdmittedPeer:
    """One connection, from when it is accepted to its end. ``sock`` is replaced where TLS wraps it."""

    def __init__(self, sock: socket.socket, host: str) -> None:
        self.sock, self.host = sock, host
        self.dropped = False  # made way for another
        self.known = False  # its handshake is over


class Admission:
    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._strangers: dict[AdmittedPeer, None] = {}  # the oldest first
        self._clients: set[AdmittedPeer] = set()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._strangers) + len(self._clients)

    def enter(self, sock: socket.socket, host: str) -> tuple[AdmittedPeer, AdmittedPeer | None]:
        """A place for a new connection, and the one that made way for it, if one had to."""
        place, dropped = AdmittedPeer(sock, host), None
        with self._lock:
            if len(self._strangers) >= self._limits.handshakes:
                dropped = self._oldest_of_most()
                del self._strangers[dropped]
                dropped.dropped = True
            self._strangers[place] = None
        if dropped is not None:
            interrupt(dropped.sock)  # its thread closes it
        return place, dropped

    def _oldest_of_most(self) -> AdmittedPeer:
        count = Counter(place.host for place in self._strangers)
        most = max(count.values())
        return next(place for place in self._strangers if count[place.host] == most)

    def admit(self, place: AdmittedPeer) -> str | None:
        """The handshake is over: a place among the clients, or why there is none."""
        limits = self._limits
        with self._lock:
            if place.dropped:
                return "too many connections are shaking hands: try again"
            if len(self._clients) >= limits.connections:
                return f"{limits.connections} clients are connected, which is the limit: try again"
            if sum(other.host == place.host for other in self._clients) >= limits.connections_of_a_host:
                return f"{limits.connections_of_a_host} clients of {place.host} are connected, which is the limit"
            self._strangers.pop(place, None)
            self._clients.add(place)
            place.known = True
            return None

    def leave(self, place: AdmittedPeer) -> None:
        with self._lock:
            self._strangers.pop(place, None)
            self._clients.discard(place)
