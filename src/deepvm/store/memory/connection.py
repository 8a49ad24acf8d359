"""One connection to one memory node: requests of store.py and upload.py in, answers out; chunks without waiting."""

from __future__ import annotations

import re
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import xxhash

from deepvm.errors import AccessDenied, Corrupt, StoreUnavailable
from deepvm.protocol import frames
from deepvm.protocol.frames import Frame, Kind
from deepvm.protocol.handshake import Handshake, Tags
from deepvm.store.base import Manifest
from deepvm.store.memory.buffers import BufferGroup, first_bytes, from_offset, group
from deepvm.store.memory.socket_io import PROGRESS_S, NodeSocket, dial

CONNECT_S = 10.0
ANSWER_S = 5.0  # for the way there and back, if the request has a deadline of its own
_HELD_BYTES = 2**21  # sent before the chunk's memory may move: a trainer that wants to step waits for this at most

Send = Callable[[Iterable[BufferGroup]], int]  # a group may be valid only until the next one is asked for
HandOver = Callable[[int, int, Send], int]  # chunk, offset


class Connection:
    """Not for several threads at once."""

    def __init__(self, address: str, channel: NodeSocket, token: str | None) -> None:
        self.address, self._channel, self._token = address, channel, token
        self.block_bytes: Any = None
        self._requests = 0
        self._answers = 0
        self._outstanding = 0
        self._held = b""  # small parts, which leave together with the next bytes
        self._head = b""  # header and meta of the last answer
        self._tags = Tags()  # empty until the handshake is over

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        connect_s: float = CONNECT_S,
        progress_s: float = PROGRESS_S,
        pace_bytes_per_s: int | None = None,
        stalled: Callable[[str], None] | None = None,
    ) -> Connection:
        """Connect and authenticate. ``stalled`` is called with the address when no byte of a wait moves for a while; it
        raises StoreUnavailable to end the wait."""
        sock = dial(address, tls=tls, connect_s=connect_s, pace_bytes_per_s=pace_bytes_per_s)
        channel = NodeSocket(address, sock, progress_s=min(progress_s, connect_s))
        connection = cls(address, channel, token)
        try:
            connection._handshake(time.monotonic() + connect_s)
        except BaseException:
            connection.close()
            raise
        channel.progress_s, channel.stalled = progress_s, stalled
        return connection

    @property
    def broken(self) -> bool:
        """True if the connection failed; False if the node only refused a request."""
        return self._channel.broken

    def close(self) -> None:
        self._channel.close()

    def interrupt(self) -> None:
        """End all waits on this connection, from another thread."""
        self._channel.interrupt()

    def fileno(self) -> int:
        return self._channel.fileno()

    # --- handshake ----------------------------------------------------------------------------------------------

    def _handshake(self, deadline_s: float) -> None:
        frame, hello, _ = self._receive(deadline_s)
        greeting = self._head
        if frame.kind is not Kind.HELLO or hello.get("version") != frames.VERSION:
            raise StoreUnavailable(
                f"memory node {self.address} has protocol version {str(hello.get('version'))[:20]!a}, "
                f"this client has {frames.VERSION}"
            )
        if not _is_greeting(hello):
            raise StoreUnavailable(f"{self.address} does not greet like a memory node: {str(hello)[:100]!a}")
        self.block_bytes = hello["block_bytes"]
        self.nonces = hello["nonce"], frames.new_nonce()
        if not hello["token"] and self._token is not None:
            raise AccessDenied(f"{self.address} asks for no token, though one is set: it is not a node of this cluster")
        if hello["token"] and self._token is None:
            raise AccessDenied(
                f"memory node {self.address} asks for a token: set DEEPVM_TOKEN, or give --token-file or token="
            )
        node_nonce, nonce = self.nonces
        address = self._channel.dialled
        handshake = Handshake(
            protocol="node", server_nonce=node_nonce, client_nonce=nonce, greeting=greeting, address=address
        )
        proof = "" if self._token is None else handshake.proof(self._token, "client")
        auth = {"version": frames.VERSION, "nonce": nonce, "address": address, "proof": proof}
        answer, _ = self.call(Kind.AUTH, auth, timeout_s=max(0.0, deadline_s - time.monotonic()), answer_s=0.0)
        if self._token is not None:
            if not frames.same(str(answer.get("proof")), handshake.proof(self._token, "server")):
                raise AccessDenied(f"{self.address} does not know the token: it is not a memory node of this cluster")
            self._tags = handshake.tags(self._token, "client")

    def open(self, run: str, *, key: str = "", session: str = "", write: bool = False) -> None:
        verifier = frames.run_verifier(run, key)
        hidden = frames.masked(verifier, self._token, *self.nonces)
        self._open(run, verifier, session=session, write=write, verifier=hidden)

    def open_to_read(self, run: str, verifier: str) -> None:
        """Open a run with the verifier of its key: for nodes that fetch from each other."""
        self._open(run, verifier, session="", write=False)

    def _open(self, run: str, secret: str, **meta: Any) -> None:
        proof = frames.proof(secret, f"run/{run}", *self.nonces)
        self.call(Kind.OPEN, {"run": run, "proof": proof, **meta})

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
        """Send a request and wait for its answer: its meta and body. The node may take ``timeout_s``, and the way
        there and back ``answer_s``."""
        deadline_s = self._channel.soon_s() if timeout_s is None else time.monotonic() + timeout_s + answer_s
        digest = xxhash.xxh3_64_intdigest(body) if body else 0
        self._send_frame(kind, meta, body, digest)
        _, answer, content = self._receive(deadline_s)
        return answer, content

    def read_chunk(self, manifest: Manifest, chunk: int, into: memoryview) -> None:
        """Receive a chunk straight into memory and verify it. The digest of the manifest counts, not that of the frame:
        the node's bytes may be damaged."""
        deadline_s = self._channel.soon_s()
        self._send_frame(Kind.GET, {"step": manifest.step, "chunk": chunk}, b"", 0)
        frame, _ = self._receive_head(deadline_s)
        if frame.body_bytes != len(into):
            self._channel.broken = True
            raise Corrupt(f"memory node {self.address} answers with {frame.body_bytes} bytes instead of {len(into)}")
        if self._channel.receive_hashed(into, deadline_s) != manifest.digests[chunk]:
            raise Corrupt(f"chunk {chunk} of step {manifest.step} is not what was saved, at {self.address}")

    # --- chunks, one after the other without waiting ------------------------------------------------------------

    def put(self, step: int, chunk: int, data: memoryview, digest: int) -> None:
        """Send a chunk from memory that does not change meanwhile."""
        groups = group([data])

        def hand_over(_: int, offset: int, send: Send) -> int:
            return send(from_offset(groups, offset))

        for _ in self.put_several(step, [chunk], [len(data)], [digest], hand_over):
            self.flush()

    def put_several(
        self, step: int, chunks: Sequence[int], lengths: Sequence[int], digests: Sequence[int], hand_over: HandOver
    ) -> Iterator[tuple[int, int]]:
        """Send up to ``frames.MOST_PUT`` chunks; yield each with its digest when the kernel has its bytes.

        ``hand_over(chunk, offset, send)`` calls ``send`` with the memory that holds a chunk from an offset on, at that
        moment, and returns what it returns: how many bytes the kernel took. Chunks of unknown digest (0) are read only
        once, for the kernel and for their digest. The last digest leaves with the next frame: ``flush`` sends it now.
        """
        self._take_answers(wait_until=None)
        body_bytes = sum(lengths) + len(chunks) * frames.DIGEST.size
        self._hold_frame(Kind.PUTS, {"step": step, "chunks": chunks}, body_bytes, 0)
        self._outstanding += 1
        for chunk, length, digest in zip(chunks, lengths, digests, strict=True):
            hasher = None if digest else xxhash.xxh3_64()
            self._send_chunk(chunk, length, hand_over, hasher)
            found = digest if hasher is None else hasher.intdigest()
            packed = frames.DIGEST.pack(found)
            self._held += packed + self._tags.next(packed)
            yield chunk, found

    def _send_chunk(self, chunk: int, length: int, hand_over: HandOver, hasher: xxhash.xxh3_64 | None) -> None:
        def send(groups: Iterable[BufferGroup]) -> int:
            sent = 0
            for size, views in groups:
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
            self._channel.await_room()
            offset += hand_over(chunk, offset, send)

    def flush(self) -> None:
        """Hand to the kernel what is held back for the next frame."""
        self._send_all(memoryview(b""))

    def finish(self) -> None:
        """Wait until every chunk sent so far is acknowledged."""
        self.flush()
        while self._outstanding:
            self._take_answers(wait_until=self._channel.soon_s())

    def _take_answers(self, wait_until: float | None) -> None:
        """Take the answers that have arrived; with a deadline, wait for one."""
        while self._outstanding and (wait_until is not None or self._channel.readable()):
            self._outstanding -= 1
            self._receive(wait_until or self._channel.soon_s())
            if wait_until is not None:
                return

    # --- frames -------------------------------------------------------------------------------------------------

    def _hold_frame(self, kind: Kind, meta: dict[str, Any] | None, body_bytes: int, digest: int) -> None:
        """Keep a frame's head: it leaves together with what is sent next."""
        self._requests += 1
        self._held += self._tags.on(frames.encode(kind, self._requests, meta, body_bytes, digest))

    def _send_frame(self, kind: Kind, meta: dict[str, Any] | None, body: bytes, digest: int) -> None:
        self._hold_frame(kind, meta, len(body), digest)
        if kind in frames.DOCUMENTS:
            body += self._tags.next_of_document(body)
        self._send_all(memoryview(body))

    def _send_all(self, data: memoryview) -> None:
        while self._held or data:
            self._channel.await_room()
            data = data[self._send_held([data], len(data)) :]

    def _send_held(self, views: Sequence[memoryview], size: int) -> int:
        """Hand to the kernel what is held back, and then these views; return how many bytes of the views it took."""
        held = len(self._held)
        if not held:
            return self._channel.send(views, size)
        count = self._channel.send([memoryview(self._held), *views], held + size)
        self._held = self._held[count:]
        return max(0, count - held)

    def _receive(self, deadline_s: float) -> tuple[Frame, dict[str, Any], bytearray]:
        """Receive a frame with its body; raise if it is an ERROR."""
        frame, meta = self._receive_head(deadline_s)
        body = bytearray(frame.body_bytes)
        if body:
            tag, end_s = bytearray(self._tags.size), self._channel.end_s(len(body))
            self._channel.receive(memoryview(body), deadline_s, end_s)
            self._channel.receive(memoryview(tag), deadline_s, end_s)
            with self._breaking():
                intact = frames.is_intact(frame, body, tag, self._tags)
            if not intact:
                raise Corrupt(f"an answer from memory node {self.address} arrived damaged")
        return frame, meta, body

    def _receive_head(self, deadline_s: float) -> tuple[Frame, dict[str, Any]]:
        end_s = deadline_s + self._channel.progress_s  # an answer that begins late is whole a little later
        with self._breaking():
            frame, meta, self._head = frames.receive_head(
                lambda into: self._channel.receive(into, deadline_s, end_s), self._tags
            )
            if self._requests:
                self._answers += 1
                malformed = frame.kind is Kind.ERROR and not frame.request  # answers to what the node could not read
                if frame.kind not in _ANSWERS or (frame.request != self._answers & 0xFFFFFFFF and not malformed):
                    raise frames.ProtocolError("an answer that does not belong to the next request")
        if frame.kind is Kind.ERROR:
            frames.raise_error(meta)
        return frame, meta

    @contextmanager
    def _breaking(self) -> Iterator[None]:
        """Mark the connection as broken after an invalid or incomplete frame: what follows cannot be read."""
        try:
            yield
        except frames.ProtocolError as error:
            self._channel.broken = True
            raise frames.ProtocolError(f"memory node {self.address} sent an invalid frame: {error}") from None
        except BaseException:
            self._channel.broken = True
            raise


def _is_greeting(hello: dict[str, Any]) -> bool:
    """True if every field is of the type and in the range that docs/protocol.md names."""
    block, nonce = hello.get("block_bytes"), hello.get("nonce")
    return (
        type(block) is int
        and block in _BLOCKS
        and isinstance(nonce, str)
        and re.fullmatch("[0-9a-f]{64}", nonce) is not None
        and isinstance(hello.get("token"), bool)
    )


_ANSWERS = (Kind.OK, Kind.DATA, Kind.ERROR)
_BLOCKS = range(frames.LEAST_BLOCK_BYTES, frames.MOST_BLOCK_BYTES + 1)
