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
from deepvm.protocol.sockets import LEAST_BYTES_PER_S

_PIECE_BYTES = 2**20  # documents grow as they arrive, so that an announced length alone takes no memory


class FrameStream:
    def __init__(self, channel: ClientSocket) -> None:
        self._channel = channel
        self._digest = memoryview(bytearray(frames.DIGEST.size + TAG_BYTES))
        self._tag = memoryview(bytearray(TAG_BYTES))
        self.tags = Tags()  # empty until the handshake is over
        self.begun = False  # a frame's first bytes were received, and it is not answered yet
        self.deadline = 0.0  # of the frame that is being received

    # --- in ---------------------------------------------------------------------------------------------------------

    def receive(self, *, first_s: float = 0.0, deadline: float | None = None) -> tuple[frames.Frame, dict[str, Any]]:
        """Receive a frame's header and meta. Its body is for the caller, who knows where it goes. The frame begins
        within ``first_s`` and has one deadline from then on; or all of it arrives before ``deadline``."""
        self.begun = False

        def receive(into: memoryview) -> None:
            if self.begun or deadline is not None:
                self._channel.receive(into, self.deadline if deadline is None else deadline)
            else:
                self.deadline = self._channel.receive_first(into, first_s=first_s)
            self.begun = True

        frame, meta, _ = frames.receive_head(receive, self.tags)
        self.deadline += frame.body_bytes / LEAST_BYTES_PER_S
        return frame, meta

    def receive_document(self, frame: frames.Frame, room: Room, *, piece_s: float) -> bytes:
        """Receive a body, which takes room as it arrives. A large one must deliver each piece within ``piece_s``."""
        deadline, length = min(self.deadline, time.monotonic() + self._channel.frame_s), frame.body_bytes
        body = bytearray()
        while len(body) < length:
            piece = bytearray(min(_PIECE_BYTES, length - len(body)))
            room.grow(len(piece), deadline)
            soon = time.monotonic() + piece_s if length > FREE_BYTES else deadline
            self._channel.receive(memoryview(piece), min(deadline, soon))
            body += piece
        tag = self._tag[: self.tags.size]
        self._channel.receive(tag, deadline)
        if not frames.is_intact(frame, body, tag, self.tags):
            raise RequestRefused("corrupt", f"the body of {frame.kind.name} is not what was sent: its digest differs")
        return bytes(body)

    def receive_digest(self) -> int:
        """Receive the digest that follows a chunk."""
        digest = self._digest[: frames.DIGEST.size + self.tags.size]
        self._channel.receive(digest, self.deadline)
        frames.check_tag(self.tags.fits(digest[: frames.DIGEST.size], digest[frames.DIGEST.size :]))
        return int(frames.DIGEST.unpack_from(digest)[0])

    def discard(self, length: int, *, tags: int = 0) -> None:
        """Discard the rest of a body, and the tags in it."""
        self._channel.discard(length + tags * self.tags.size, self.deadline)
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
