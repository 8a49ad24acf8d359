"""One client's connection, in a thread of its own: the handshake, then frames in, answers out, in order."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import xxhash

from deepvm.errors import Corrupt, NotFound, StoreError
from deepvm.memnode import fields, wire
from deepvm.memnode.arena import NoRoom
from deepvm.memnode.channel import Channel, Gone
from deepvm.memnode.refusal import Refused
from deepvm.memnode.requests import Answer, Requests
from deepvm.memnode.uploads import Upload
from deepvm.memnode.wire import Kind

if TYPE_CHECKING:
    from deepvm.memnode.server import MemoryNode

_PIECE_BYTES = 2**20  # documents grow as they arrive, so that an announced length alone takes no memory


@dataclass(frozen=True, slots=True)
class Peer:
    """Both sides' nonces: what proofs on this connection are bound to."""

    node_nonce: str
    client_nonce: str


class Connection:
    def __init__(self, node: MemoryNode, channel: Channel, name: str) -> None:
        self._node, self._channel, self.name = node, channel, name
        self._header = memoryview(bytearray(wire.HEADER.size))
        self._meta = memoryview(bytearray(wire.MOST_META_BYTES))
        self._digest = memoryview(bytearray(wire.DIGEST.size))
        self.busy = False  # between a frame's first byte and its answer
        self._counted_in = self._counted_out = 0

    # --- life -----------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Until the client leaves, misbehaves, or the node stops. Never raises."""
        requests: Requests | None = None
        try:
            peer = self._shake_hands()
            if peer is None:
                return
            requests = Requests(self._node, peer.node_nonce, peer.client_nonce)
            while not self._node.closing:
                self._one(requests)
        except Gone as reason:
            self._node.log.info("disconnected", client=self.name, reason=str(reason))
        except wire.ProtocolError as error:
            self._node.counters.add(malformed_frames=1)
            self._node.log.warning("malformed", client=self.name, message=str(error))
            self._say_malformed(str(error))
        except Exception as error:  # a mistake of ours: this client loses its connection, the others nothing
            self._node.log.error("internal error", client=self.name, error=f"{type(error).__name__}: {error}")
        finally:
            if requests is not None:
                requests.leave()
            self._count()
            self._channel.close()

    def shutdown(self) -> None:
        self._channel.shutdown()

    def _say_malformed(self, message: str) -> None:
        with contextlib.suppress(Gone):
            self._channel.send(wire.encode(Kind.ERROR, 0, wire.error_meta("malformed", message)))

    def _count(self) -> None:
        into, out = self._channel.received_bytes, self._channel.sent_bytes
        self._node.counters.add(bytes_in=into - self._counted_in, bytes_out=out - self._counted_out)
        self._counted_in, self._counted_out = into, out

    # --- frames ---------------------------------------------------------------------------------------------------

    def _read_frame(self, *, first_s: float, timeout_s: float | None = None) -> tuple[wire.Frame, dict[str, Any]]:
        self._channel.receive(self._header, first_s=first_s, timeout_s=timeout_s)
        self.busy = True
        frame = wire.decode_header(self._header)
        if not frame.meta_bytes:
            return frame, {}
        meta = self._meta[: frame.meta_bytes]
        self._channel.receive(meta, timeout_s=timeout_s)
        return frame, wire.decode_meta(meta)

    def _one(self, requests: Requests) -> None:
        self.busy = False
        frame, meta = self._read_frame(first_s=self._node.settings.limits.idle_s)
        try:
            if frame.kind is Kind.PUT:
                self._put(requests, frame, meta)
                answer: Answer = None
            elif frame.kind is Kind.PUTS:
                self._puts(requests, frame, meta)
                answer = None
            elif frame.kind is Kind.MEND:
                self._mend(requests, frame, meta)
                answer = None
            elif frame.kind is Kind.GET:
                self._get(requests, frame, meta)
                return
            else:
                answer = requests.answer(frame.kind, meta, self._document(frame))
        except Refused as no:
            self._channel.send(wire.encode(Kind.ERROR, frame.request, wire.error_meta(no.code, no.message)))
            return
        finally:
            self._count()
        if isinstance(answer, bytes):
            head = wire.encode(Kind.DATA, frame.request, None, len(answer), xxhash.xxh3_64_intdigest(answer))
            self._channel.send(head, answer)
        else:
            self._channel.send(wire.encode(Kind.OK, frame.request, answer))

    def _document(self, frame: wire.Frame) -> bytes:
        length = frame.body_bytes
        if not length:
            return b""
        with self._node.documents.take(length, timeout_s=self._node.settings.limits.frame_s):
            deadline = time.monotonic() + self._node.settings.limits.frame_s
            body = bytearray()
            while len(body) < length:
                piece = bytearray(min(_PIECE_BYTES, length - len(body)))
                self._channel.receive(memoryview(piece), timeout_s=max(0.0, deadline - time.monotonic()))
                body += piece
        if xxhash.xxh3_64_intdigest(body) != frame.digest:
            raise Refused("corrupt", f"the body of {frame.kind.name} is not what was sent: its digest differs")
        return bytes(body)

    # --- chunks: straight from the socket into a block, and from a block into the socket ------------------------------

    def _put(self, requests: Requests, frame: wire.Frame, meta: dict[str, Any]) -> None:
        length, chunk = frame.body_bytes, fields.chunk(meta)
        try:
            upload = requests.upload(meta)
            block = upload.start(chunk, length)
        except Refused:
            self._channel.discard(length)
            raise
        self._receive_chunk(upload, chunk, block, length, lambda: frame.digest)

    def _puts(self, requests: Requests, frame: wire.Frame, meta: dict[str, Any]) -> None:
        """Several chunks, each followed by its digest. Those before one that is refused are here to stay."""
        left, chunks = frame.body_bytes, fields.chunks(meta)
        try:
            upload = requests.upload(meta)
            lengths = [upload.length(chunk) for chunk in chunks]
            expected = sum(lengths) + len(chunks) * wire.DIGEST.size
            if left != expected:
                raise Refused("failed", f"chunks {chunks} take {expected} bytes, {left} were sent")
            for chunk, length in zip(chunks, lengths, strict=True):
                block = upload.start(chunk, length)
                left -= length + wire.DIGEST.size
                self._receive_chunk(upload, chunk, block, length, self._receive_digest)
        except Refused:
            self._channel.discard(left)
            raise

    def _receive_chunk(self, upload: Upload, chunk: int, block: int, length: int, digest: Callable[[], int]) -> None:
        """``digest`` is asked when the chunk has been received: what its sender says."""
        whole = False
        try:
            with self._node.arena.view(block, length) as view:
                found = self._channel.receive_hashed(view)
                whole = found == digest()
        finally:
            if not whole:
                upload.cancel(block)
        if not whole:
            self._node.counters.add(corrupt_chunks=1)
            self._node.log.warning("corrupt chunk", client=self.name, step=upload.begin.step, chunk=chunk)
            raise Refused("corrupt", f"chunk {chunk} is not what was sent: its digest differs")
        upload.finish(chunk, block, found)

    def _receive_digest(self) -> int:
        self._channel.receive(self._digest)
        return int(wire.DIGEST.unpack(self._digest)[0])

    def _mend(self, requests: Requests, frame: wire.Frame, meta: dict[str, Any]) -> None:
        """Whoever may read a checkpoint may bring a damaged chunk of it back: the bytes that its manifest names."""
        chunk, length = fields.chunk(meta), frame.body_bytes
        try:
            checkpoint = requests.checkpoint(meta)
            if chunk >= len(checkpoint.manifest.digests) or checkpoint.manifest.span(chunk)[1] != length:
                raise Refused("failed", f"step {checkpoint.step} has no chunk {chunk} of {length} bytes")
            if length > self._node.arena.block_bytes:  # saved before the node was started with smaller blocks
                raise Refused("not-found", f"chunk {chunk} of step {checkpoint.step} is not in memory here")
            block = self._node.arena.take(reserved=False)
        except Refused:
            self._channel.discard(length)
            raise
        except NoRoom:
            self._channel.discard(length)
            raise Refused("busy", "no block is free: try again") from None
        mended = False
        try:
            with self._node.arena.view(block, length) as view:
                if self._channel.receive_hashed(view) != checkpoint.manifest.digests[chunk]:
                    raise Refused("corrupt", f"these bytes are not chunk {chunk} of step {checkpoint.step}")
            mended = checkpoint.mend(chunk, block)
        finally:
            if not mended:
                self._node.arena.drop(block)
        if not mended:
            raise Refused("not-found", f"chunk {chunk} of step {checkpoint.step} is not in memory here")
        self._node.log.warning("mended", client=self.name, step=checkpoint.step, chunk=chunk)

    def _get(self, requests: Requests, frame: wire.Frame, meta: dict[str, Any]) -> None:
        checkpoint = requests.checkpoint(meta)
        chunk = fields.chunk(meta)
        if chunk >= len(checkpoint.manifest.digests) or not checkpoint.has(chunk):
            raise Refused("not-found", f"step {checkpoint.step} has no chunk {chunk} here")
        try:
            with checkpoint.chunk(chunk) as view:
                digest = checkpoint.manifest.digests[chunk]
                self._channel.send(wire.encode(Kind.DATA, frame.request, None, len(view), digest), view)
        except NotFound as error:
            raise Refused("not-found", str(error)) from None
        except Corrupt as error:
            self._node.counters.add(corrupt_chunks=1)
            self._node.log.error("damaged", step=checkpoint.step, chunk=chunk, message=str(error))
            raise Refused("corrupt", str(error)) from None
        except StoreError as error:
            raise Refused("failed", str(error)) from None

    # --- handshake ------------------------------------------------------------------------------------------------

    def _shake_hands(self) -> Peer | None:
        """The node shows a nonce first; a client that knows the token answers for it, and hears that the node does."""
        settings = self._node.settings
        nonce = wire.new_nonce()
        hello = {
            "version": wire.VERSION,
            "block_bytes": settings.block_bytes,
            "nonce": nonce,
            "token": settings.token is not None,
            "features": list(wire.FEATURES),
        }
        self._channel.send(wire.encode(Kind.HELLO, 0, hello))
        limit_s = settings.limits.handshake_s
        frame, meta = self._read_frame(first_s=limit_s, timeout_s=limit_s)
        if frame.kind is not Kind.AUTH:
            raise wire.ProtocolError(f"{frame.kind.name} before AUTH")
        version = fields.integer(meta, "version", 0, 2**31)
        if version != wire.VERSION:
            raise wire.ProtocolError(f"the client speaks version {version}, this node version {wire.VERSION}")
        client_nonce = fields.hexadecimal(meta, "nonce")
        assert client_nonce is not None  # noqa: S101 - required above
        answer: dict[str, Any] = {}
        if settings.token is not None:
            proof = fields.hexadecimal(meta, "proof", required=False) or ""
            if not wire.same(proof, wire.proof(settings.token, "client", nonce, client_nonce)):
                self._node.counters.add(failed_logins=1)
                self._node.log.warning("denied", client=self.name, reason="wrong token")
                time.sleep(settings.limits.failure_delay_s)
                denied = wire.error_meta("denied", "the token is missing or is not this node's")
                self._channel.send(wire.encode(Kind.ERROR, frame.request, denied))
                return None
            answer["proof"] = wire.proof(settings.token, "node", nonce, client_nonce)
        self._channel.send(wire.encode(Kind.OK, frame.request, answer))
        return Peer(nonce, client_nonce)
