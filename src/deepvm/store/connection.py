"""One connection to one memory node: handshake, calls, and chunks sent without waiting for each answer.

The socket never blocks: waiting is done in poll, with a deadline, and memory is only looked at while bytes are handed
to the kernel. So a chunk's source may move (from live parameters to their copy) between two pieces of it.
"""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import xxhash

from deepvm.errors import AccessDenied, Corrupt, StoreUnavailable, UsageError
from deepvm.memnode import wire
from deepvm.memnode.sockets import HASHED_BYTES, tune
from deepvm.memnode.wire import Frame, Kind
from deepvm.store.strips import Strip, cut, first_bytes, from_offset

CONNECT_S = 10.0
ANSWER_S = 5.0  # on the way, where the node is told how long it may take
PROGRESS_S = 30.0  # a peer that moves no byte for so long is taken for dead
_WOKEN_BYTES = 2**18  # of a chunk wake whoever waits for it: a byte at a time, they would come and go for nothing
_HELD_BYTES = 2**21  # sent before the chunk's memory may move: a trainer that wants to step waits so long at most

Send = Callable[[Sequence[Strip]], int]
HandOver = Callable[[int, int, Send], int]  # chunk, offset


def parse_address(text: str) -> tuple[str, int]:
    """``10.0.0.9:7070`` or ``[::1]:7070``."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or not 0 < int(port) < 65536 or not host:
        raise UsageError(f"{text!r} is no address of a memory node: write it like 10.0.0.9:7070")
    return host.strip("[]"), int(port)


class Connection:
    """Not for several threads at once."""

    def __init__(
        self,
        address: str,
        *,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        connect_s: float = CONNECT_S,
        progress_s: float = PROGRESS_S,
        pace_bytes_per_s: int | None = None,
    ) -> None:
        self.address = address
        self.block_bytes: Any = None
        self.broken = False  # or else the node was heard, and said no
        self._token, self._progress_s = token, progress_s
        self._requests = 0
        self._answers = 0
        self._outstanding = 0
        self._held = b""  # small things, which leave together with what comes after them
        self._full = False  # the kernel took less than it was given
        self._header = bytearray(wire.HEADER.size)
        host, port = parse_address(address)
        try:
            plain = socket.create_connection((host, port), timeout=connect_s)
            tune(plain)
            if pace_bytes_per_s is not None:
                plain.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, pace_bytes_per_s)
            self._sock = plain if tls is None else tls.wrap_socket(plain, server_hostname=host)
        except (OSError, ssl.SSLError) as error:
            raise StoreUnavailable(f"memory node {address} cannot be reached: {error}") from None
        self._tls = tls is not None
        self._sock.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._sock, select.POLLIN)
        self._waits_for, self._woken_at = select.POLLIN, 1
        try:
            self._handshake(time.monotonic() + connect_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._sock.close()

    def interrupt(self) -> None:
        """From another thread: whoever waits on this connection stops waiting."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def fileno(self) -> int:
        return self._sock.fileno()

    # --- handshake ----------------------------------------------------------------------------------------------

    def _handshake(self, deadline_s: float) -> None:
        frame, hello, _ = self._receive(deadline_s)
        if frame.kind is not Kind.HELLO or hello.get("version") != wire.VERSION:
            raise StoreUnavailable(
                f"memory node {self.address} speaks protocol {hello.get('version')}, this is {wire.VERSION}"
            )
        self.block_bytes = hello.get("block_bytes")
        if not isinstance(self.block_bytes, int) or self.block_bytes not in _BLOCKS or not hello.get("nonce"):
            raise StoreUnavailable(f"{self.address} greets like no memory node: {str(hello)[:100]}")
        self.node_nonce, self.nonce = str(hello["nonce"]), wire.new_nonce()
        self.features = frozenset(map(str, hello.get("features") or ()))
        if not hello.get("token") and self._token is not None:
            raise AccessDenied(f"{self.address} asks for no token, though one is set: it is no node of this cluster")
        if hello.get("token") and self._token is None:
            raise AccessDenied(f"memory node {self.address} asks for a token: set DEEPVM_TOKEN or token=")
        known = "" if self._token is None else wire.proof(self._token, "client", self.node_nonce, self.nonce)
        answer, _ = self.call(Kind.AUTH, {"version": wire.VERSION, "nonce": self.nonce, "proof": known})
        if self._token is not None and hello.get("token"):
            expected = wire.proof(self._token, "node", self.node_nonce, self.nonce)
            if not wire.same(str(answer.get("proof")), expected):
                raise AccessDenied(f"{self.address} does not know the token: it is no memory node of this cluster")

    def open(self, run: str, *, key: str = "", session: str = "", write: bool = False) -> None:
        verifier = wire.run_verifier(run, key)
        self.call(
            Kind.OPEN,
            {
                "run": run,
                "session": session,
                "write": write,
                "proof": wire.proof(verifier, f"run/{run}", self.node_nonce, self.nonce),
                "verifier": wire.masked(verifier, self._token, self.node_nonce, self.nonce),
            },
        )

    # --- calls --------------------------------------------------------------------------------------------------

    def call(
        self,
        kind: Kind,
        meta: dict[str, Any] | None = None,
        body: bytes = b"",
        *,
        timeout_s: float | None = None,
        answer_s: float = ANSWER_S,
    ) -> tuple[dict[str, Any], bytearray]:
        """Send a request and wait for its answer: its meta and body. ``timeout_s`` is how long the node may take, and
        ``answer_s`` how long the way there and back."""
        deadline_s = time.monotonic() + (self._progress_s if timeout_s is None else timeout_s + answer_s)
        digest = xxhash.xxh3_64_intdigest(body) if body else 0
        self._send_frame(kind, meta, body, digest)
        frame, answer, content = self._receive(deadline_s)
        if frame.kind is Kind.ERROR:
            wire.raise_error(answer)
        return answer, content

    def read_into(self, kind: Kind, meta: dict[str, Any], into: memoryview, digest: int) -> None:
        """Send a request whose answer is a body of known length and digest, and receive it straight into memory,
        verified. The frame's own digest is not asked: it may be that of bytes which were damaged before."""
        deadline_s = time.monotonic() + self._progress_s
        self._send_frame(kind, meta, b"", 0)
        frame, answer = self._receive_head(deadline_s)
        if frame.kind is Kind.ERROR:
            wire.raise_error(answer)
        if frame.body_bytes != len(into):
            self.broken = True
            raise Corrupt(f"memory node {self.address} answers with {frame.body_bytes} bytes instead of {len(into)}")
        if self._receive_hashed(into, deadline_s) != digest:
            raise Corrupt(
                f"chunk {meta.get('chunk')} of step {meta.get('step')} is not what was saved, at {self.address}"
            )

    # --- chunks, one after the other without waiting ------------------------------------------------------------

    def put(self, step: int, chunk: int, data: memoryview, digest: int) -> None:
        """Send a chunk of memory that stays as it is."""
        strips = cut([data])
        self._put(step, chunk, len(data), digest, lambda _, offset, send: send(from_offset(strips, offset)))

    def put_several(
        self, step: int, chunks: Sequence[int], lengths: Sequence[int], digests: Sequence[int], hand_over: HandOver
    ) -> Iterator[tuple[int, int]]:
        """Send up to ``wire.MOST_PUT`` chunks; yields each with its digest when its bytes are with the kernel.

        ``hand_over(chunk, offset, send)`` calls ``send`` with the memory that holds a chunk from an offset on, at that
        moment, and returns what it returns: how many bytes the kernel took. To a node with the feature PUTS all leave
        in one frame, and those of unknown digest (0) are read only once, for the kernel and for their digest. The last
        digest then leaves with the next frame: where none may come for a while, ``flush``."""
        if wire.PUTS not in self.features:
            for chunk, length, digest in zip(chunks, lengths, digests, strict=True):
                self._put(step, chunk, length, digest, hand_over)
                yield chunk, digest
            return
        self._take_answers(wait_until=None)
        body_bytes = sum(lengths) + len(chunks) * wire.DIGEST.size
        self._hold_frame(Kind.PUTS, {"step": step, "chunks": chunks}, body_bytes, 0)
        self._outstanding += 1
        for chunk, length, digest in zip(chunks, lengths, digests, strict=True):
            hasher = None if digest else xxhash.xxh3_64()
            self._send_chunk(chunk, length, hand_over, hasher)
            found = digest if hasher is None else hasher.intdigest()
            self._held += wire.DIGEST.pack(found)
            yield chunk, found

    def _put(self, step: int, chunk: int, length: int, digest: int, hand_over: HandOver) -> None:
        self._take_answers(wait_until=None)
        self._hold_frame(Kind.PUT, {"step": step, "chunk": chunk}, length, digest)
        self._outstanding += 1
        self._send_chunk(chunk, length, hand_over, None)

    def _send_chunk(self, chunk: int, length: int, hand_over: HandOver, hasher: xxhash.xxh3_64 | None) -> None:
        def send(strips: Sequence[Strip]) -> int:
            sent = 0
            for size, views in strips:
                count = self._send_held(views, size)
                if hasher is not None:
                    for view in views if count == size else first_bytes(views, count):
                        hasher.update(view)
                sent += count
                if count < size or sent >= _HELD_BYTES:
                    break
            return sent

        offset = 0
        while offset < length:
            if self._full:
                self._wait(select.POLLOUT, time.monotonic() + self._progress_s)
            offset += hand_over(chunk, offset, send)

    def flush(self) -> None:
        """Hand everything to the kernel that is held back for what comes next."""
        self._send_all(memoryview(b""))

    def finish(self) -> None:
        """Wait until every chunk sent so far is acknowledged."""
        self.flush()
        while self._outstanding:
            self._take_answers(wait_until=time.monotonic() + self._progress_s)

    def _take_answers(self, wait_until: float | None) -> None:
        """Take the answers that are there; with a deadline, wait for one."""
        while self._outstanding:
            if wait_until is None:
                if not self._readable():
                    return
                deadline_s = time.monotonic() + self._progress_s
            else:
                deadline_s = wait_until
            frame, answer, _ = self._receive(deadline_s)
            self._outstanding -= 1
            if frame.kind is Kind.ERROR:
                wire.raise_error(answer)
            if wait_until is not None:
                return

    # --- bytes --------------------------------------------------------------------------------------------------

    def _hold_frame(self, kind: Kind, meta: dict[str, Any] | None, body_bytes: int, digest: int) -> None:
        """It leaves together with what is sent next."""
        self._requests += 1
        self._held += wire.encode(kind, self._requests, meta, body_bytes, digest)

    def _send_frame(self, kind: Kind, meta: dict[str, Any] | None, body: bytes | memoryview, digest: int) -> None:
        self._hold_frame(kind, meta, len(body), digest)
        self._send_all(memoryview(body))

    def _send_all(self, data: memoryview) -> None:
        while self._held or data:
            if self._full:
                self._wait(select.POLLOUT, time.monotonic() + self._progress_s)
            data = data[self._send_held([data], len(data)) :]

    def _send_held(self, views: Sequence[memoryview], size: int) -> int:
        """Hand to the kernel what waits to leave, and then these; how much of these it took."""
        held = len(self._held)
        if not held:
            return self._send_some(views, size)
        count = self._send_some([memoryview(self._held), *views], held + size)
        self._held = self._held[count:]
        return max(0, count - held)

    def _send_some(self, views: Sequence[memoryview], size: int) -> int:
        try:
            count = self._sock.send(views[0]) if len(views) == 1 or self._tls else self._sock.sendmsg(views)
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            count = 0
        except OSError as error:
            raise self._break(f"went away: {error}") from None
        self._full = count < size
        return count

    def _break(self, how: str) -> StoreUnavailable:
        self.broken = True
        return StoreUnavailable(f"memory node {self.address} {how}")

    def _receive(self, deadline_s: float) -> tuple[Frame, dict[str, Any], bytearray]:
        frame, meta = self._receive_head(deadline_s)
        body = bytearray(frame.body_bytes)
        if body:
            self._receive_exactly(memoryview(body), deadline_s)
            if xxhash.xxh3_64_intdigest(body) != frame.digest:
                raise Corrupt(f"an answer from memory node {self.address} arrived damaged")
        return frame, meta, body

    def _receive_head(self, deadline_s: float) -> tuple[Frame, dict[str, Any]]:
        self._receive_exactly(memoryview(self._header), deadline_s)
        intact, self.broken = self.broken, True
        frame = wire.decode_header(self._header)
        if self._requests:
            self._answers += 1
            malformed = frame.kind is Kind.ERROR and not frame.request  # answers to what the node could not read
            if frame.kind not in _ANSWERS or (frame.request != self._answers & 0xFFFFFFFF and not malformed):
                raise wire.ProtocolError(f"memory node {self.address} answers what was not asked: give it up")
        meta = bytearray(frame.meta_bytes)
        if meta:
            self._receive_exactly(memoryview(meta), deadline_s)
        decoded = wire.decode_meta(meta)
        self.broken = intact
        return frame, decoded

    def _receive_hashed(self, into: memoryview, deadline_s: float) -> int:
        """Fill ``into`` and return its digest, taken piece by piece while each is still in the core's cache."""
        hasher = xxhash.xxh3_64()
        for start in range(0, len(into), HASHED_BYTES):
            piece = into[start : start + HASHED_BYTES]
            self._wake_at(min(_WOKEN_BYTES, len(into) - start - len(piece)))  # so many are sure to come
            self._receive_exactly(piece, deadline_s)
            deadline_s = max(deadline_s, time.monotonic() + self._progress_s)
            hasher.update(piece)
        return hasher.intdigest()

    def _receive_exactly(self, into: memoryview, deadline_s: float) -> None:
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
                deadline_s = max(deadline_s, time.monotonic() + self._progress_s)

    def _readable(self) -> bool:
        if isinstance(self._sock, ssl.SSLSocket) and self._sock.pending():
            return True
        self._watch(select.POLLIN)
        return bool(self._poll.poll(0))

    def _wait(self, event: int, deadline_s: float) -> None:
        self._watch(event)
        left_ms = max(0.0, (deadline_s - time.monotonic()) * 1e3)
        if self._poll.poll(left_ms):
            return
        self._wake_at(1)  # a peer that is slow is not dead
        if not self._poll.poll(0):
            raise self._break("did not answer in time")

    def _wake_at(self, size_bytes: int) -> None:
        """Let so many bytes have come before a wait for some is over."""
        size_bytes = max(1, size_bytes)
        if size_bytes != self._woken_at and not self._tls:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size_bytes)
            self._woken_at = size_bytes

    def _watch(self, event: int) -> None:
        if event != self._waits_for:
            self._poll.modify(self._sock, event)
            self._waits_for = event


_ANSWERS = (Kind.OK, Kind.DATA, Kind.ERROR)
_BLOCKS = range(wire.LEAST_BLOCK_BYTES, wire.MOST_BLOCK_BYTES + 1)
_SO_MAX_PACING_RATE = getattr(socket, "SO_MAX_PACING_RATE", 47)
