"""Frames of one client's connection: bytes of socket_io.py in, checked frames for connection.py out, and back."""

from __future__ import annotations

import time
from typing import Any

import xxhash

from deepvm.memnode.errors import RequestRefused
from deepvm.memnode.serving.socket_io import ClientSocket
from deepvm.memnode.storage.budgets import FREE_BYTES, Room
from deepvm.protocol import frames
from deepvm.protocol.frames import Kind
from deepvm.protocol.handshake import TAG_BYTES, Tags

_PIECE_BYTES = 2**20  # documents grow as they arrive, so that an announced length alone takes no memory


class FrameStream:
    def __init__(self, channel: ClientSocket) -> None:
        self._channel = channel
        self._digest = memoryview(bytearray(frames.DIGEST.size + TAG_BYTES))
        self._tag = memoryview(bytearray(TAG_BYTES))
        self.tags = Tags()  # empty until the handshake is over
        self.begun = False  # a frame's first byte was received, and it is not answered yet

    # --- in ---------------------------------------------------------------------------------------------------------

    def receive(self, *, first_s: float, timeout_s: float | None = None) -> tuple[frames.Frame, dict[str, Any]]:
        """Receive a frame's header and meta. Its body is for the caller, who knows where it goes."""
        self.begun = False

        def receive(into: memoryview) -> None:
            self._channel.receive(into, first_s=None if self.begun else first_s, timeout_s=timeout_s)
            self.begun = True

        return frames.receive_head(receive, self.tags)[:2]

    def receive_document(self, frame: frames.Frame, room: Room, *, within_s: float, piece_s: float) -> bytes:
        """Receive a body, which takes room as it arrives. A large one must deliver each piece within ``piece_s``."""
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
        if not frames.is_intact(frame, body, tag, self.tags):
            raise RequestRefused("corrupt", f"the body of {frame.kind.name} is not what was sent: its digest differs")
        return bytes(body)

    def receive_digest(self) -> int:
        """Receive the digest that follows a chunk."""
        digest = self._digest[: frames.DIGEST.size + self.tags.size]
        self._channel.receive(digest)
        frames.check_tag(self.tags.fits(digest[: frames.DIGEST.size], digest[frames.DIGEST.size :]))
        return int(frames.DIGEST.unpack_from(digest)[0])

    def discard(self, length: int, *, tags: int = 0) -> None:
        """Discard the rest of a body, and the tags in it."""
        self._channel.discard(length + tags * self.tags.size)
        self.tags.skip(tags)

    # --- out --------------------------------------------------------------------------------------------------------

    def send(self, kind: Kind, request: int, meta: dict[str, Any] | None = None) -> None:
        self._channel.send(self.tags.on(frames.encode(kind, request, meta)))

    def refuse(self, request: int, code: str, message: str) -> None:
        self.send(Kind.ERROR, request, frames.error_meta(code, message))

    def send_document(self, request: int, body: bytes) -> None:
        head = self.tags.on(frames.encode(Kind.DATA, request, None, len(body), xxhash.xxh3_64_intdigest(body)))
        self._channel.send(head, body, self.tags.next_of_document(body))

    def send_chunk(self, request: int, chunk: memoryview, digest: int) -> None:
        self._channel.send(self.tags.on(frames.encode(Kind.DATA, request, None, len(chunk), digest)), chunk)
