"""Move the bytes of one client's connection between its socket and memory, every wait with a deadline."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import time

import xxhash

from deepvm.memnode.errors import PeerGone
from deepvm.protocol.handshake import local_address
from deepvm.protocol.sockets import HASHED_BYTES, interrupt, tune

_TICK_S = 1.0  # how often a thread that waits for its client checks its deadline
_JUNK = bytearray(2**18)  # discarded bytes are received here, by all threads at once


class ClientSocket:
    """Plain sockets block in the kernel (one call fills a whole block); TLS sockets wait in Python."""

    def __init__(self, sock: socket.socket, *, frame_s: float) -> None:
        self._sock = sock
        self._tls = isinstance(sock, ssl.SSLSocket)
        self._frame_s = frame_s
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

    def receive(self, into: memoryview, *, timeout_s: float | None = None, first_s: float | None = None) -> None:
        """Fill ``into``. ``first_s`` is how long the first byte may take, if that is longer than the rest."""
        done, wanted = 0, len(into)
        limit_s = self._frame_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + (limit_s if first_s is None else first_s)
        while done < wanted:
            try:
                count = self._sock.recv_into(into[done:], wanted - done, self._flags)
            except (BlockingIOError, TimeoutError, InterruptedError):
                count = -1
            except (OSError, ValueError):
                raise PeerGone("the connection broke") from None
            if count == 0:
                raise PeerGone("the connection was closed")
            now = time.monotonic() if done + max(count, 0) < wanted else 0.0
            if count > 0:
                if done == 0 and first_s is not None:
                    deadline = now + limit_s
                done += count
            if now > deadline:
                raise PeerGone("the client is too slow")
        self.received_bytes += wanted

    def receive_hashed(self, into: memoryview) -> int:
        """Fill ``into`` and return its digest, taken piece by piece while each is still in the core's cache."""
        deadline = time.monotonic() + self._frame_s
        digest, receive = xxhash.xxh3_64(), self._sock.recv_into
        for start in range(0, len(into), HASHED_BYTES):
            piece = into[start : start + HASHED_BYTES]
            try:
                done = receive(piece, 0, self._flags)
            except OSError:  # receive() finds out what it means
                done = 0
            self.received_bytes += done
            if done < len(piece):
                self.receive(piece[done:], timeout_s=max(0.0, deadline - time.monotonic()))
            digest.update(piece)
        return digest.intdigest()

    def discard(self, length: int) -> None:
        """Receive bytes that will not be used, within the time of one frame."""
        deadline = time.monotonic() + self._frame_s
        junk = memoryview(_JUNK)
        while length:
            piece = min(length, len(junk))
            self.receive(junk[:piece], timeout_s=max(0.0, deadline - time.monotonic()))
            length -= piece

    def send(self, *pieces: bytes | bytearray | memoryview) -> None:
        deadline = time.monotonic() + self._frame_s
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
