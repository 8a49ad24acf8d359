"""Accept connections, for nodes and hubs: an address in, a thread for each connection out, within limits.

Clients that have proved the token have places of their own, which strangers cannot take. A connection is a stranger
until its handshake is over. If the strangers' places are taken, the oldest stranger of the host that has most of them
is dropped. So a client that answers at once gets in, however many connections are held open beside it. If the clients'
places are taken, the client that has been silent the longest is dropped, if that is long enough: it may dial again.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from deepvm.protocol.addresses import join_address
from deepvm.protocol.sockets import interrupt, listen_at

HANDSHAKES = 64
TOO_MANY_HANDSHAKES = "too many connections are shaking hands"
SILENT = "its place went to another client, since it was silent the longest"
_WAIT_S = 0.5  # how often an idle listener checks whether it should stop
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 1.0
_STOP_S = 5.0


class Peer:
    """One connection, from when it is accepted to its end. ``sock`` is replaced if TLS wraps it."""

    def __init__(self, sock: socket.socket, address: Any) -> None:
        self.sock, self.host = sock, str(address[0])
        self.name = join_address(*address[:2])
        self.dropped = False
        self.served_s = time.monotonic()  # when it was last answered
        self.busy = False  # it has asked something and is not answered yet

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Keep the client's place while it is served."""
        self.busy = True
        try:
            yield
        finally:
            self.busy, self.served_s = False, time.monotonic()


class Acceptor:
    """Listens when made, accepts after ``start``. ``serve`` runs in a thread for each peer; then its socket is closed.
    ``dropped`` reports a connection that lost its place, and why; ``failed`` one that could not be served. A client is
    dropped for another one only after ``silent_s`` of silence."""

    def __init__(
        self,
        listen: str,
        serve: Callable[[Peer], None],
        *,
        connections: int,
        connections_of_a_host: int,
        handshakes: int = HANDSHAKES,
        silent_s: float = math.inf,
        dropped: Callable[[Peer, str], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._serve, self._dropped, self._failed = serve, dropped, failed
        self._connections, self._connections_of_a_host = connections, connections_of_a_host
        self._handshakes, self._silent_s = handshakes, silent_s
        self._strangers: dict[Peer, None] = {}  # the oldest first
        self._clients: set[Peer] = set()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._listener = listen_at(listen)
        self._listener.settimeout(_WAIT_S)
        self.address = join_address(*self._listener.getsockname()[:2])
        self._thread = threading.Thread(target=self._accept, name="deepvm-accept", daemon=True)

    def __len__(self) -> int:
        return len(self._strangers) + len(self._clients)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Accept no more connections; the accepted ones continue."""
        self._stopping.set()
        interrupt(self._listener)
        self._listener.close()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)

    def _accept(self) -> None:
        """No failure ends this loop. Out of descriptors, threads or memory, it closes the connection, reports it and
        continues after a pause, which doubles while failures follow each other."""
        pause_s = _FIRST_PAUSE_S
        while not self._stopping.is_set():
            sock: socket.socket | None = None
            try:
                sock, address = self._listener.accept()
                self._start_thread(self.enter(sock, address))
                pause_s = _FIRST_PAUSE_S
            except TimeoutError:
                continue
            except Exception as error:  # it concerns one connection: the next may succeed
                if sock is not None:
                    sock.close()
                if not self._stopping.is_set():
                    self._failed(error)
                self._stopping.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _start_thread(self, peer: Peer) -> None:
        try:
            threading.Thread(target=self._run, args=(peer,), name=f"deepvm-{peer.name}", daemon=True).start()
        except BaseException:
            self.leave(peer)
            raise

    def _run(self, peer: Peer) -> None:
        try:
            self._serve(peer)
        except Exception as error:  # out of memory, for one: this client loses its connection, the others nothing
            self._failed(error)
        finally:
            peer.sock.close()
            self.leave(peer)

    # --- places ---------------------------------------------------------------------------------------------------

    def enter(self, sock: socket.socket, address: Any) -> Peer:
        """Take a stranger's place for a new connection; drop another stranger if all are taken."""
        peer, oldest = Peer(sock, address), None
        with self._lock:
            if len(self._strangers) >= self._handshakes:
                count = Counter(stranger.host for stranger in self._strangers)
                oldest = next(one for one in self._strangers if count[one.host] == max(count.values()))
                del self._strangers[oldest]
                oldest.dropped = True
            self._strangers[peer] = None
        if oldest is not None:
            self._drop(oldest, TOO_MANY_HANDSHAKES)
        return peer

    def admit(self, peer: Peer) -> str | None:
        """Give a client's place to a peer whose handshake is over; return why there is none."""
        with self._lock:
            if peer.dropped:
                return f"{TOO_MANY_HANDSHAKES}: try again"
            neighbours = [other for other in self._clients if other.host == peer.host]
            silent = None
            if len(neighbours) >= self._connections_of_a_host:
                silent = self._longest_silent(neighbours)
                if silent is None:
                    return f"{self._connections_of_a_host} clients of {peer.host} are connected, which is the limit"
            elif len(self._clients) >= self._connections:
                silent = self._longest_silent(self._clients)
                if silent is None:
                    return f"{self._connections} clients are connected, which is the limit: try again"
            self._strangers.pop(peer, None)
            self._clients.add(peer)
            if silent is not None:
                self._clients.remove(silent)
                silent.dropped = True
        if silent is not None:
            self._drop(silent, SILENT)
        return None

    def _longest_silent(self, clients: Iterable[Peer]) -> Peer | None:
        """Return the client that asked nothing for the longest time, if that is long enough."""
        longest = min((client for client in clients if not client.busy), key=lambda one: one.served_s, default=None)
        return longest if longest and time.monotonic() - longest.served_s > self._silent_s else None

    def _drop(self, peer: Peer, reason: str) -> None:
        interrupt(peer.sock)  # its thread closes it
        self._dropped(peer, reason)

    def leave(self, peer: Peer) -> None:
        with self._lock:
            self._strangers.pop(peer, None)
            self._clients.discard(peer)
