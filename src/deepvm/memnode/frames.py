"""Frames of one client's connection, as the node reads and writes them, between channel.py and connection.py."""

from __future__ import annotations

import time
from typing import Any

import xxhash

from deepvm.memnode import wire
from deepvm.memnode.auth import TAG_BYTES, NoTags, Tags, of_body
from deepvm.memnode.channel import Channel
from deepvm.memnode.refusal import Refused
from deepvm.memnode.wire import Kind

_PIECE_BYTES = 2**20  # documents grow as they arrive, so that an announced length alone takes no memory


class Frames:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._header = memoryview(bytearray(wire.HEADER.size))
        self._meta = memoryview(bytearray(wire.MOST_META_BYTES + TAG_BYTES))
        self._digest = memoryview(bytearray(wire.DIGEST.size + TAG_BYTES))
        self._tag = memoryview(bytearray(TAG_BYTES))
        self.tags: Tags = NoTags()  # until the handshake is over
        self.begun = False  # a frame's first byte was received, and it is not answered yet

    # --- in ---------------------------------------------------------------------------------------------------------

    def receive(self, *, first_s: float, timeout_s: float | None = None) -> tuple[wire.Frame, dict[str, Any]]:
        """A frame's header and meta. Its body is for the caller, who knows where it goes."""
        self.begun = False
        self._channel.receive(self._header, first_s=first_s, timeout_s=timeout_s)
        self.begun = True
        frame = wire.decode_header(self._header)
        rest = self._meta[: frame.meta_bytes + self.tags.size]
        if not rest:
            return frame, {}
        self._channel.receive(rest, timeout_s=timeout_s)
        meta = rest[: frame.meta_bytes]
        self._check(bytes(self._header) + meta, rest[frame.meta_bytes :])
        return frame, wire.decode_meta(meta)

    def receive_document(self, frame: wire.Frame, *, within_s: float) -> bytes:
        deadline, length = time.monotonic() + within_s, frame.body_bytes
        body = bytearray()
        while len(body) < length:
            piece = bytearray(min(_PIECE_BYTES, length - len(body)))
            self._channel.receive(memoryview(piece), timeout_s=max(0.0, deadline - time.monotonic()))
            body += piece
        tag = self._tag[: self.tags.size]
        self._channel.receive(tag, timeout_s=max(0.0, deadline - time.monotonic()))
        if xxhash.xxh3_64_intdigest(body) != frame.digest:
            self.tags.skip(1)
            raise Refused("corrupt", f"the body of {frame.kind.name} is not what was sent: its digest differs")
        if tag:
            self._check(of_body(body), tag)
        return bytes(body)

    def receive_digest(self) -> int:
        """Of a chunk that was received just now, as one of several in a frame."""
        digest = self._digest[: wire.DIGEST.size + self.tags.size]
        self._channel.receive(digest)
        self._check(digest[: wire.DIGEST.size], digest[wire.DIGEST.size :])
        return int(wire.DIGEST.unpack_from(digest)[0])

    def discard(self, length: int, *, tags: int = 0) -> None:
        """Take so much of a body off the wire, and so many tags in it."""
        self._channel.discard(length + tags * self.tags.size)
        self.tags.skip(tags)

    def _check(self, data: bytes | memoryview, tag: memoryview) -> None:
        if not self.tags.fits(data, tag):
            raise wire.ProtocolError("a frame's tag is wrong: somebody in between changed, repeated or left out some")

    # --- out --------------------------------------------------------------------------------------------------------

    def send(self, kind: Kind, request: int, meta: dict[str, Any] | None = None) -> None:
        head = wire.encode(kind, request, meta)
        self._channel.send(head + self.tags.next(head))

    def refuse(self, request: int, code: str, message: str) -> None:
        self.send(Kind.ERROR, request, wire.error_meta(code, message))

    def send_document(self, request: int, body: bytes) -> None:
        head = wire.encode(Kind.DATA, request, None, len(body), xxhash.xxh3_64_intdigest(body))
        head += self.tags.next(head)
        self._channel.send(head, body, self.tags.next(of_body(body)) if body and self.tags.size else b"")

    def send_chunk(self, request: int, chunk: memoryview, digest: int) -> None:
        head = wire.encode(Kind.DATA, request, None, len(chunk), digest)
        self._channel.send(head + self.tags.next(head), chunk)
