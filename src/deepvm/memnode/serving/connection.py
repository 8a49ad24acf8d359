"""One client's connection, in a thread of its own: after the handshake, frames in, answers out, in order."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from deepvm.errors import Corrupt, NotFound, StoreError
from deepvm.memnode.errors import PeerGone, RequestRefused
from deepvm.memnode.serving import fields
from deepvm.memnode.serving.frame_io import FrameStream
from deepvm.memnode.serving.requests import Answer, Requests
from deepvm.memnode.serving.socket_io import ClientSocket
from deepvm.memnode.storage.arena import ArenaFull
from deepvm.memnode.storage.budgets import Room
from deepvm.memnode.storage.upload import Upload
from deepvm.protocol import frames
from deepvm.protocol.acceptor import Peer
from deepvm.protocol.frames import Kind
from deepvm.protocol.handshake import Handshake, Tags
from deepvm.strict_json import MalformedJson

if TYPE_CHECKING:
    from deepvm.memnode.server import MemoryNode

_MOST_ADDRESS = 60  # [IPv6]:PORT takes 47


class ClientConnection:
    def __init__(self, node: MemoryNode, channel: ClientSocket, peer: Peer, *, handshake_until: float) -> None:
        self._node, self._channel, self._peer, self.name = node, channel, peer, peer.name
        self._handshake_until = handshake_until
        self._frames = FrameStream(channel)
        self._counted_in = self._counted_out = 0

    @property
    def busy(self) -> bool:
        """True between a frame's first byte and its answer."""
        return self._frames.begun

    # --- life -----------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Serve until the client leaves, sends something invalid, or the node stops. Never raises."""
        requests: Requests | None = None
        try:
            requests = Requests(self._node, *self._shake_hands(), is_gone=self._channel.is_gone)
            limits = self._node.settings.limits
            first_s = limits.first_request_s
            while not self._node.closing:
                frame, meta = self._frames.receive(first_s=first_s)
                with self._peer.asking():
                    self._answer(requests, frame, meta)
                first_s = limits.idle_s
        except PeerGone as reason:
            self._node.log.info("disconnected", client=self.name, reason=str(reason))
        except (frames.ProtocolError, MalformedJson) as error:
            self._node.counters.add(malformed_frames=1)
            self._node.log.warning("malformed", client=self.name, message=str(error))
            with contextlib.suppress(PeerGone):
                self._frames.refuse(0, "malformed", str(error))
        except Exception as error:  # a mistake of ours: this client loses its connection, the others nothing
            self._node.log.error("internal error", client=self.name, error=f"{type(error).__name__}: {error}")
        finally:
            if requests is not None:
                requests.leave()
            self._count()
            self._channel.close()

    def interrupt(self) -> None:
        self._channel.interrupt()

    def _count(self) -> None:
        into, out = self._channel.received_bytes, self._channel.sent_bytes
        self._node.counters.add(bytes_in=into - self._counted_in, bytes_out=out - self._counted_out)
        self._counted_in, self._counted_out = into, out

    # --- frames ---------------------------------------------------------------------------------------------------

    def _answer(self, requests: Requests, frame: frames.Frame, meta: dict[str, Any]) -> None:
        try:
            answer: Answer = None
            if frame.kind is Kind.PUTS:
                self._puts(requests, frame, meta)
            elif frame.kind is Kind.MEND:
                self._mend(requests, frame, meta)
            elif frame.kind is Kind.GET:
                self._get(requests, frame, meta)
                return
            else:
                answer = requests.answer(frame.kind, meta, self._document(frame))
        except RequestRefused as refusal:
            self._frames.refuse(frame.request, refusal.code, refusal.message)
            return
        finally:
            self._count()
        if isinstance(answer, bytes):
            self._frames.send_document(frame.request, answer)
        else:
            self._frames.send(Kind.OK, frame.request, answer)

    def _document(self, frame: frames.Frame) -> bytes:
        if not frame.body_bytes:
            return b""
        limits = self._node.settings.limits
        with Room(self._node.documents) as room:
            return self._frames.receive_document(frame, room, piece_s=limits.document_piece_s)

    # --- chunks: straight from the socket into a block, and from a block into the socket ------------------------------

    def _puts(self, requests: Requests, frame: frames.Frame, meta: dict[str, Any]) -> None:
        """Receive chunks, each followed by its digest. Those before one that is refused stay."""
        left, chunks = frame.body_bytes, fields.chunks(meta)
        tags_left = len(chunks)
        try:
            upload = requests.upload(meta)
            lengths = [upload.length(chunk) for chunk in chunks]
            expected = sum(lengths) + len(chunks) * frames.DIGEST.size
            if left != expected:
                raise RequestRefused(
                    "failed", f"chunks {chunks} and their digests have {expected} bytes, {left} were sent"
                )
            for chunk, length in zip(chunks, lengths, strict=True):
                block = upload.start()
                left -= length + frames.DIGEST.size
                tags_left -= 1
                self._receive_chunk(upload, chunk, block, length)
        except RequestRefused:
            self._frames.discard(left, tags=tags_left)
            raise

    def _receive_chunk(self, upload: Upload, chunk: int, block: int, length: int) -> None:
        """Receive a chunk and its digest, verify it, and attach it to the upload."""
        whole = False
        try:
            with self._node.arena.view(block, length) as view:
                found = self._channel.receive_hashed(view, self._frames.deadline)
                whole = found == self._frames.receive_digest()
        finally:
            if not whole:
                upload.cancel(block)
        if not whole:
            self._node.counters.add(corrupt_chunks=1)
            self._node.log.warning("corrupt chunk", client=self.name, step=upload.begin.step, chunk=chunk)
            raise RequestRefused("corrupt", f"chunk {chunk} is not what was sent: its digest differs")
        upload.finish(chunk, block, found)

    def _mend(self, requests: Requests, frame: frames.Frame, meta: dict[str, Any]) -> None:
        """Replace a damaged chunk, for any client that may read it: only by the bytes that the manifest lists."""
        chunk, length = fields.chunk(meta), frame.body_bytes
        try:
            checkpoint = requests.checkpoint(meta)
            if chunk >= len(checkpoint.manifest.digests) or checkpoint.manifest.span(chunk)[1] != length:
                raise RequestRefused("failed", f"step {checkpoint.step} has no chunk {chunk} of {length} bytes")
            if length > self._node.arena.block_bytes:  # saved before the node was started with smaller blocks
                raise RequestRefused("not-found", f"chunk {chunk} of step {checkpoint.step} is not in memory here")
            block = self._take_block()
        except RequestRefused:
            self._frames.discard(length)
            raise
        mended = False
        try:
            with self._node.arena.view(block, length) as view:
                if self._channel.receive_hashed(view, self._frames.deadline) != checkpoint.manifest.digests[chunk]:
                    raise RequestRefused("corrupt", f"these bytes are not chunk {chunk} of step {checkpoint.step}")
            mended = checkpoint.mend(chunk, block)
        finally:
            if not mended:
                self._node.arena.drop(block)
        if not mended:
            raise RequestRefused("not-found", f"chunk {chunk} of step {checkpoint.step} is not in memory here")
        self._node.log.warning("mended", client=self.name, step=checkpoint.step, chunk=chunk)

    def _take_block(self) -> int:
        try:
            return self._node.arena.take(reserved=False)
        except ArenaFull:
            raise RequestRefused("busy", "no block is free: try again") from None

    def _get(self, requests: Requests, frame: frames.Frame, meta: dict[str, Any]) -> None:
        checkpoint = requests.checkpoint(meta)
        chunk = fields.chunk(meta)
        if chunk >= len(checkpoint.manifest.digests) or not checkpoint.has(chunk):
            raise RequestRefused("not-found", f"step {checkpoint.step} has no chunk {chunk} here")
        try:
            with checkpoint.chunk(chunk) as view:
                self._frames.send_chunk(frame.request, view, checkpoint.manifest.digests[chunk])
        except NotFound as error:
            raise RequestRefused("not-found", str(error)) from None
        except Corrupt as error:
            self._node.counters.add(corrupt_chunks=1)
            self._node.log.error("damaged", step=checkpoint.step, chunk=chunk, message=str(error))
            raise RequestRefused("corrupt", str(error)) from None
        except StoreError as error:
            raise RequestRefused("failed", str(error)) from None

    # --- handshake ------------------------------------------------------------------------------------------------

    def _shake_hands(self) -> tuple[str, str]:
        """Verify that the client knows the token, and prove that the node does. Return the node's and its nonce."""
        settings, nonce = self._node.settings, frames.new_nonce()
        hello = {
            "version": frames.VERSION,
            "block_bytes": settings.block_bytes,
            "nonce": nonce,
            "token": settings.token is not None,
        }
        greeting = frames.encode(Kind.HELLO, 0, hello)
        self._channel.send(greeting)
        frame, meta = self._frames.receive(deadline=self._handshake_until)
        if frame.kind is not Kind.AUTH:
            raise frames.ProtocolError(f"{frame.kind.name} before AUTH")
        version = fields.integer(meta, "version", 0, 2**31)
        if version != frames.VERSION:
            raise frames.ProtocolError(f"the client has protocol version {version}, this node has {frames.VERSION}")
        client_nonce = fields.hexadecimal(meta, "nonce")
        answer, tags = {}, Tags()
        try:
            if settings.token is not None:
                address = fields.text(meta, "address", _MOST_ADDRESS)
                handshake = Handshake(
                    protocol="node", server_nonce=nonce, client_nonce=client_nonce, greeting=greeting, address=address
                )
                self._check_proof(handshake, settings.token, fields.optional_hexadecimal(meta, "proof") or "")
                answer = {"proof": handshake.proof(settings.token, "server")}
                tags = handshake.tags(settings.token, "server")
            self._node.admit(self._peer)
        except RequestRefused as refusal:
            self._frames.refuse(frame.request, refusal.code, refusal.message)
            raise PeerGone("refused") from None
        self._frames.send(Kind.OK, frame.request, answer)
        self._frames.tags = tags
        return nonce, client_nonce

    def _check_proof(self, handshake: Handshake, token: str, proof: str) -> None:
        """Refuse a client that does not know the token, or that dialled another address: a relay listens there."""
        own = self._channel.local_address
        if not frames.same(proof, handshake.proof(token, "client")):
            reason, message = "wrong token", "the token is missing or is not this node's"
        elif handshake.address != own and handshake.address not in self._node.advertised:
            reason = f"dialled {handshake.address}"
            message = (
                f"the client dialled {handshake.address}, which is not an address of this node ({own}): somebody is in "
                f"between; if that is a forwarded port, start the node with --advertise {handshake.address}"
            )
        else:
            return
        self._node.counters.add(failed_logins=1)
        self._node.log.warning("denied", client=self.name, reason=reason)
        time.sleep(self._node.settings.limits.failure_delay_s)
        raise RequestRefused("denied", message)
