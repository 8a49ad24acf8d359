"""FrameStream of one client's connection, as the node reads and writes them, between socket_io.py and connection.py."""

from __future__ import annotations

import time
from typing import Any

import xxhash

from deepvm.memnode.errors import RequestRefused
from deepvm.memnode.serving.socket_io import ClientSocket
from deepvm.memnode.storage.budgets import FREE_BYTES, Room
from deepvm.protocol import frames
from deepvm.protocol.auth import TAG_BYTES, NoTags, Tags, of_body
from deepvm.protocol.frames import Kind

_PIECE_BYTES = 2**20  # documents grow as they arrive, so that an announced length alone takes no memory


class FrameStream:
    def __init__(self, channel: ClientSocket) -> None:
        self._channel = channel
        self._header = memoryview(bytearray(frames.HEADER.size + TAG_BYTES))
        self._meta = memoryview(bytearray(frames.MOST_META_BYTES))
        self._digest = memoryview(bytearray(frames.DIGEST.size + TAG_BYTES))
        self._tag = memoryview(bytearray(TAG_BYTES))
        self.tags: Tags = NoTags()  # until the handshake is over
        self.begun = False  # a frame's first byte was received, and it is not answered yet

    # --- in ---------------------------------------------------------------------------------------------------------

    def receive(self, *, first_s: float, timeout_s: float | None = None) -> tuple[frames.Frame, dict[str, Any]]:
        """A frame's header and meta. Its body is for the caller, who knows where it goes."""
        self.begun = False
        start = self._header[: frames.HEADER.size + self.tags.size]
        self._channel.receive(start, first_s=first_s, timeout_s=timeout_s)
        self.begun = True
        header, tag = start[: frames.HEADER.size], start[frames.HEADER.size :]
        frame = frames.decode_header(header)
        meta = self._meta[: frame.meta_bytes]
        if meta:
            self._channel.receive(meta, timeout_s=timeout_s)
        if tag:
            self._check(bytes(header) + meta, tag)
        return frame, frames.decode_meta(meta)

    def receive_document(self, frame: frames.Frame, room: Room, *, within_s: float, piece_s: float) -> bytes:
        """It takes room as it arrives. One that takes other documents' room has so long for each piece."""
        deadline, length = time.monotonic() + within_s, frame.body_bytes
        body = bytearray()
        while len(body) < length:
            piece = bytearray(min(_PIECE_BYTES, length - len(body)))
            room.grow(len(piece), deadline)
            left_s = max(0.0, deadline - time.monotonic())
            self._channel.receive(memoryview(piece), timeout_s=left_s if length <= FREE_BYTES else min(left_s, piece_s))
            body += piece
        tag = self._tag[: self.tags.size]
        self._channel.receive(tag, timeout_s=max(0.0, deadline - time.monotonic()))
        if xxhash.xxh3_64_intdigest(body) != frame.digest:
            self.tags.skip(1)
            raise RequestRefused("corrupt", f"the body of {frame.kind.name} is not what was sent: its digest differs")
        if tag:
            self._check(of_body(body), tag)
        return bytes(body)

    def receive_digest(self) -> int:
        """Of a chunk that was received just now, as one of several in a frame."""
        digest = self._digest[: frames.DIGEST.size + self.tags.size]
        self._channel.receive(digest)
        self._check(digest[: frames.DIGEST.size], digest[frames.DIGEST.size :])
        return int(frames.DIGEST.unpack_from(digest)[0])

    def discard(self, length: int, *, tags: int = 0) -> None:
        """Take so much of a body off the wire, and so many tags in it."""
        self._channel.discard(length + tags * self.tags.size)
        self.tags.skip(tags)

    def _check(self, data: bytes | memoryview, tag: memoryview) -> None:
        if not self.tags.fits(data, tag):
            raise frames.ProtocolError("a frame's tag is wrong: somebody in between changed, repeated or left out some")

    # --- out --------------------------------------------------------------------------------------------------------

    def send(self, kind: Kind, request: int, meta: dict[str, Any] | None = None) -> None:
        self._channel.send(self.tags.on(frames.encode(kind, request, meta)))

    def refuse(self, request: int, code: str, message: str) -> None:
        self.send(Kind.ERROR, request, frames.error_meta(code, message))

    def send_document(self, request: int, body: bytes) -> None:
        head = self.tags.on(frames.encode(Kind.DATA, request, None, len(body), xxhash.xxh3_64_intdigest(body)))
        self._channel.send(head, body, self.tags.next(of_body(body)) if body and self.tags.size else b"")

    def send_chunk(self, request: int, chunk: memoryview, digest: int) -> None:
        self._channel.send(self.tags.on(frames.encode(Kind.DATA, request, None, len(chunk), digest)), chunk)
