"""Move the bytes of one connection to a memory node between memory and the kernel; connection.py makes frames of them.

The socket never blocks: waits happen in poll, with a deadline. Memory is read only while the kernel takes bytes. So
a chunk's source may move (from live parameters to their copy) between two pieces of it.
"""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections.abc import Callable, Sequence

import xxhash

from deepvm.errors import StoreUnavailable
from deepvm.protocol.addresses import split_address
from deepvm.protocol.handshake import dialled_address
from deepvm.protocol.sockets import HASHED_BYTES, LEAST_BYTES_PER_S, interrupt, tune
from deepvm.store.memory.health import STALL_S

PROGRESS_S = 30.0  # a node that moves no byte for this long is considered dead
_WOKEN_BYTES = 2**18  # of a chunk end a wait for it: waking for every byte would cost time for nothing
_SO_MAX_PACING_RATE = getattr(socket, "SO_MAX_PACING_RATE", 47)


def dial(address: str, *, tls: ssl.SSLContext | None, connect_s: float, pace_bytes_per_s: int | None) -> socket.socket:
    """Connect to a memory node, or raise StoreUnavailable."""
    host, port = split_address(address)
    sock: socket.socket | None = None
    try:
        sock = socket.create_connection((host, port), timeout=connect_s)
        tune(sock)
        if pace_bytes_per_s is not None:
            sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, pace_bytes_per_s)
        return sock if tls is None else tls.wrap_socket(sock, server_hostname=host)
    except OSError as error:
        if sock is not None:
            sock.close()
        problem = f"cannot be reached: {error.strerror or error}"
        if isinstance(error, ssl.SSLCertVerificationError):
            problem = f"shows a certificate that is not trusted: {error.verify_message.rstrip('.')}"
        raise StoreUnavailable(f"memory node {address} {problem}") from None


class NodeSocket:
    """Not for several threads at once."""

    def __init__(self, address: str, sock: socket.socket, *, progress_s: float) -> None:
        self.address, self._sock, self.progress_s = address, sock, progress_s
        self.stalled: Callable[[str], None] | None = None  # called if no byte moves for a while; raises to give up
        self.broken = False  # False also if the node only refused a request
        self._full = False  # the kernel took less than it was given
        self._tls = isinstance(sock, ssl.SSLSocket)
        self._sock.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._sock, select.POLLIN)
        self._waits_for, self._woken_at = select.POLLIN, 1

    @property
    def dialled(self) -> str:
        """IP:PORT of the other end, as this end sees it."""
        return dialled_address(self._sock)

    def close(self) -> None:
        self._sock.close()

    def interrupt(self) -> None:
        """End all waits on this socket, from another thread."""
        interrupt(self._sock)

    def fileno(self) -> int:
        return self._sock.fileno()

    def soon_s(self) -> float:
        """Return when a node that moves no byte from now on is considered dead."""
        return time.monotonic() + self.progress_s

    # --- out ----------------------------------------------------------------------------------------------------

    def await_room(self) -> None:
        """Wait until the kernel takes more, if it took less than it was given."""
        if self._full:
            self._wait(select.POLLOUT, self.soon_s())

    def send(self, views: Sequence[memoryview], size: int) -> int:
        """Hand these views, of ``size`` bytes together, to the kernel; return how many bytes it took."""
        try:
            count = self._sock.send(views[0]) if len(views) == 1 or self._tls else self._sock.sendmsg(views)
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            count = 0
        except OSError as error:
            raise self._break(f"went away: {error}") from None
        self._full = count < size
        return count

    # --- in -----------------------------------------------------------------------------------------------------

    def end_s(self, size_bytes: int) -> float:
        """Return when the rest of an answer must be here that has begun: a node that drips is considered dead, too."""
        return self.soon_s() + size_bytes / LEAST_BYTES_PER_S

    def receive(self, into: memoryview, deadline_s: float, end_s: float) -> None:
        """Fill ``into``. The first byte arrives before ``deadline_s``, each further one soon, all before ``end_s``."""
        received = 0
        while received < len(into):
            try:
                count = self._sock.recv_into(into[received:])
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                self._wait(select.POLLIN, deadline_s)
                continue
            except OSError as error:
                raise self._break(f"went away: {error}") from None
            if count == 0:
                raise self._break("closed the connection")
            received += count
            if received < len(into):
                deadline_s = min(max(deadline_s, self.soon_s()), end_s)
                if time.monotonic() > end_s:
                    raise self._break(f"answers too slowly: {received} of {len(into)} bytes in time")

    def receive_hashed(self, into: memoryview, deadline_s: float) -> int:
        """Fill ``into`` and return its digest, taken piece by piece while each is still in the core's cache."""
        hasher, end_s = xxhash.xxh3_64(), self.end_s(len(into))
        for start in range(0, len(into), HASHED_BYTES):
            piece = into[start : start + HASHED_BYTES]
            self._wake_at(min(_WOKEN_BYTES, len(into) - start - len(piece)))  # these are sure to arrive
            self.receive(piece, deadline_s, end_s)
            deadline_s = max(deadline_s, self.soon_s())
            hasher.update(piece)
        return hasher.intdigest()

    def readable(self) -> bool:
        if isinstance(self._sock, ssl.SSLSocket) and self._sock.pending():
            return True
        self._watch(select.POLLIN)
        return bool(self._poll.poll(0))

    # --- waiting ------------------------------------------------------------------------------------------------

    def _wait(self, event: int, deadline_s: float) -> None:
        self._watch(event)
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            if self._poll.poll(1e3 * (left_s if self.stalled is None else min(left_s, STALL_S))):
                return
            self._wake_at(1)  # a slow node is not dead
            if self._poll.poll(0):
                return
            if self.stalled is None or time.monotonic() >= deadline_s:
                raise self._break("did not answer in time")
            try:
                self.stalled(self.address)
            except StoreUnavailable as error:
                raise self._break(f"hangs ({error})") from None

    def _wake_at(self, size_bytes: int) -> None:
        """Let a wait end only when this many bytes have arrived."""
        size_bytes = max(1, size_bytes)
        if size_bytes != self._woken_at and not self._tls:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size_bytes)
            self._woken_at = size_bytes

    def _watch(self, event: int) -> None:
        if event != self._waits_for:
            self._poll.modify(self._sock, event)
            self._waits_for = event

    def _break(self, how: str) -> StoreUnavailable:
        self.broken = True
        return StoreUnavailable(f"memory node {self.address} {how}")
