"""Move the bytes of one client's connection between its socket and memory, every wait with a deadline."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import time

import xxhash

from deepvm.memnode.errors import PeerGone
from deepvm.protocol.handshake import local_address
from deepvm.protocol.sockets import HASHED_BYTES, LEAST_BYTES_PER_S, interrupt, tune

_TICK_S = 1.0  # how often a thread that waits for its client checks its deadline
_JUNK = bytearray(2**18)  # discarded bytes are received here, by all threads at once


class ClientSocket:
    """Plain sockets block in the kernel (one call fills a whole block); TLS sockets wait in Python."""

    def __init__(self, sock: socket.socket, *, frame_s: float) -> None:
        self._sock = sock
        self._tls = isinstance(sock, ssl.SSLSocket)
        self.frame_s = frame_s
        self._flags = 0 if self._tls else socket.MSG_WAITALL
        self.received_bytes = self.sent_bytes = 0
        tune(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if self._tls:
            sock.settimeout(_TICK_S)
        else:
            tick = struct.pack("@ll", int(_TICK_S), int(_TICK_S % 1 * 1e6))
            sock.setblocking(True)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, tick)

    @property
    def local_address(self) -> str:
        """IP:PORT at which this client reached the node."""
        return local_address(self._sock)

    def is_gone(self) -> bool:
        """True if the client has closed its end, or its connection broke: nothing waits for an answer."""
        watched = select.poll()
        try:
            watched.register(self._sock, select.POLLRDHUP)  # POLLHUP and POLLERR are always watched
            return bool(watched.poll(0))
        except (OSError, ValueError):
            return True

    def receive_first(self, into: memoryview, *, first_s: float) -> float:
        """Fill ``into`` with the first bytes of a frame, which may take ``first_s`` to begin. Return the frame's
        deadline, without the time for its body."""
        return self._receive(into, time.monotonic() + first_s, first=True)

    def receive(self, into: memoryview, deadline: float) -> None:
        """Fill ``into`` before the deadline of its frame."""
        self._receive(into, deadline)

    def _receive(self, into: memoryview, deadline: float, *, first: bool = False) -> float:
        done, wanted = 0, len(into)
        while done < wanted:
            try:
                count = self._sock.recv_into(into[done:], wanted - done, self._flags)
            except (BlockingIOError, TimeoutError, InterruptedError):
                count = -1
            except (OSError, ValueError):
                raise PeerGone("the connection broke") from None
            if count == 0:
                raise PeerGone("the connection was closed")
            now = time.monotonic()
            if count > 0:
                if first:
                    deadline, first = now + self.frame_s, False
                done += count
            _check(deadline, now)
        self.received_bytes += wanted
        return deadline

    def receive_hashed(self, into: memoryview, deadline: float) -> int:
        """Fill ``into`` and return its digest, taken piece by piece while each is still in the core's cache."""
        digest, receive = xxhash.xxh3_64(), self._sock.recv_into
        for start in range(0, len(into), HASHED_BYTES):
            piece = into[start : start + HASHED_BYTES]
            try:
                done = receive(piece, 0, self._flags)
            except OSError:  # receive() finds out what it means
                done = 0
            self.received_bytes += done
            if done < len(piece):
                self.receive(piece[done:], deadline)
            digest.update(piece)
        _check(deadline, time.monotonic())
        return digest.intdigest()

    def discard(self, length: int, deadline: float) -> None:
        """Receive bytes that will not be used."""
        junk = memoryview(_JUNK)
        while length:
            piece = min(length, len(junk))
            self.receive(junk[:piece], deadline)
            length -= piece

    def send(self, *pieces: bytes | bytearray | memoryview) -> None:
        deadline = time.monotonic() + self.frame_s + sum(map(len, pieces)) / LEAST_BYTES_PER_S
        pieces = tuple(
            piece for piece in pieces if len(piece)
        )  # an empty one after MSG_MORE would delay the rest by 200 ms
        for number, piece in enumerate(pieces, start=1):
            more = 0 if self._tls or number == len(pieces) else socket.MSG_MORE
            self._send_all(memoryview(piece), more, deadline)

    def _send_all(self, piece: memoryview, flags: int, deadline: float) -> None:
        done = 0
        while done < len(piece):
            try:
                done += self._sock.send(piece[done:], flags)
            except (BlockingIOError, TimeoutError, InterruptedError):
                pass
            except (OSError, ValueError):
                raise PeerGone("the connection broke") from None
            if done < len(piece) and time.monotonic() > deadline:
                raise PeerGone("the client receives its answer too slowly")
        self.sent_bytes += done

    def interrupt(self) -> None:
        """End all waits on this connection, from another thread."""
        interrupt(self._sock)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.close()


def _check(deadline: float, now: float) -> None:
    """Raise if a deadline is over. Bytes that arrive later do not count: each piece of a frame could take as long."""
    if now > deadline:
        raise PeerGone("the client is too slow")
