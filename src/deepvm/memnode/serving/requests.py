"""What clients ask for, other than chunks: each kind of frame is one method, from checked fields to an answer."""

from __future__ import annotations

import struct
import sys
import time
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from deepvm.memnode.errors import RequestRefused
from deepvm.memnode.serving import fields
from deepvm.memnode.storage.checkpoint import Checkpoint
from deepvm.memnode.storage.dedup import Dedup
from deepvm.memnode.storage.registry import may_open
from deepvm.memnode.storage.run import Run
from deepvm.memnode.storage.upload import Upload
from deepvm.protocol import frames
from deepvm.protocol.frames import Kind
from deepvm.store.base import MOST_STEP

if TYPE_CHECKING:
    from deepvm.memnode.server import MemoryNode

Answer = dict[str, Any] | bytes | None  # the meta of an OK, the body of a DATA, or a bare OK
_OFFER = struct.Struct("<IQ").size
_LINK = struct.Struct("<IQ32s").size
_MOST_LISTED_STEPS = 600  # an answer's meta has a limit; beyond it only the newest are told
_MOST_LISTED_RUNS = 600


class Requests:
    """The requests of one connection, and the run that it has open."""

    def __init__(self, node: MemoryNode, node_nonce: str, client_nonce: str) -> None:
        self._node, self._node_nonce, self._client_nonce = node, node_nonce, client_nonce
        self._name: str | None = None
        self._run: Run | None = None
        self._verifier: str | None = None  # of a run that was not here when it was opened
        self._session: str | None = None  # only of those who write
        self._bound: Upload | None = None  # the upload that this connection began or joined, and no later one
        key = frames.content_key(node_nonce, client_nonce)
        self._dedup = Dedup(node.arena, key, node.counters, node.log)
        self._handlers: dict[Kind, Callable[[dict[str, Any], bytes], Answer]] = {
            Kind.OPEN: self._open,
            Kind.BEGIN: self._begin,
            Kind.KEEP: self._keep,
            Kind.OFFER: self._offer,
            Kind.LINK: self._link,
            Kind.EXTRA: self._extra,
            Kind.EXTRAS: self._extras,
            Kind.SEAL: self._seal,
            Kind.PUBLISH: self._publish,
            Kind.ABORT: self._abort,
            Kind.STEPS: self._steps,
            Kind.MANIFEST: self._manifest,
            Kind.DELETE: self._delete,
            Kind.RUNS: self._runs,
            Kind.STATUS: self._status,
        }

    def answer(self, kind: Kind, meta: dict[str, Any], body: bytes) -> Answer:
        handler = self._handlers.get(kind)
        if handler is None:
            raise frames.ProtocolError(f"a client does not send {kind.name} here")
        return handler(meta, body)

    def leave(self) -> None:
        if self._run is not None:
            with self._run.lock:
                self._run.users -= 1
            self._run = None

    # --- runs -----------------------------------------------------------------------------------------------------

    def _open(self, meta: dict[str, Any], body: bytes) -> Answer:
        del body
        name, write = fields.run_name(meta), fields.flag(meta, "write")
        session = fields.text(meta, "session", 200) if write or meta.get("session") else None
        proof = fields.hexadecimal(meta, "proof", required=False)
        verifier = fields.hexadecimal(meta, "verifier", required=False)
        if verifier is not None:
            verifier = frames.masked(verifier, self._node.settings.token, self._node_nonce, self._client_nonce)
        run = self._node.runs.find(name)
        self._check_key(run, name, proof, verifier)
        if run is None and write:
            assert verifier is not None  # noqa: S101 - may_open saw to it
            run = self._node.runs.add(name, verifier)
            self._check_key(run, name, proof, verifier)  # two may come with one name at once
        self.leave()
        self._name, self._verifier, self._session = name, verifier, None
        self._enter(run)
        if write and run is not None:
            assert session is not None  # noqa: S101 - text() saw to it
            run.claim(session)
            self._session = session
        return None

    def _check_key(self, run: Run | None, name: str, proof: str | None, verifier: str | None) -> None:
        nonces = {"node_nonce": self._node_nonce, "client_nonce": self._client_nonce}
        if not may_open(run, name, proof=proof, verifier=verifier, **nonces):
            self._node.counters.add(failed_logins=1)
            time.sleep(self._node.settings.limits.failure_delay_s)
            raise RequestRefused("denied", f"run {name!r} is not here, or its key is another")

    def _enter(self, run: Run | None) -> None:
        self._run = run
        if run is not None:
            with run.lock:
                run.users += 1

    def _opened(self) -> Run | None:
        """The run, or None where it is still not here."""
        if self._name is None:
            raise RequestRefused("failed", "no run is open: OPEN comes first")
        if self._run is None:
            run = self._node.runs.find(self._name)
            if run is not None and self._verifier is not None and frames.same(run.verifier, self._verifier):
                self._enter(run)
        return self._run

    def _here(self) -> Run:
        run = self._opened()
        if run is None:
            raise RequestRefused("not-found", f"run {self._name!r} has no checkpoint here")
        return run

    def upload(self, meta: dict[str, Any]) -> Upload:
        run, step, bound = self._here(), fields.step(meta), self._bound
        if bound is not None and bound.begin.step == step and bound.session == self._session:
            return bound
        return run.upload(step, self._session)

    def checkpoint(self, meta: dict[str, Any]) -> Checkpoint:
        return self._here().checkpoint(fields.step(meta))

    # --- saving ---------------------------------------------------------------------------------------------------

    def _begin(self, meta: dict[str, Any], body: bytes) -> Answer:
        del body
        settings = self._node.settings
        begin = fields.begin(meta, settings.block_bytes)
        if self._node.stopping:
            raise RequestRefused("stopping", "the node is stopping: no new upload begins")
        run, room_s = self._here(), settings.limits.room_s
        self._bound = run.begin(begin, self._session, buffers=settings.buffers, room_s=room_s)
        return None

    def _keep(self, meta: dict[str, Any], body: bytes) -> Answer:
        run = self._here()
        chunks, digests, _ = _columns(Kind.KEEP, body, _OFFER)
        upload = self.upload(meta)
        source = run.checkpoint(fields.step(meta, "from_step"))
        upload.keep(source, chunks, digests)
        return None

    def _offer(self, meta: dict[str, Any], body: bytes) -> Answer:
        chunks, digests, _ = _columns(Kind.OFFER, body, _OFFER)
        return pack("I", self._dedup.candidates(self.upload(meta), chunks, digests))

    def _link(self, meta: dict[str, Any], body: bytes) -> Answer:
        chunks, digests, rest = _columns(Kind.LINK, body, _LINK)
        proofs = (rest[start : start + 32] for start in range(0, len(rest), 32))
        return pack("I", self._dedup.link(self.upload(meta), zip(chunks, digests, proofs, strict=True)))

    def _extra(self, meta: dict[str, Any], body: bytes) -> Answer:
        self.upload(meta).add_extra(fields.integer(meta, "rank", 0, fields.MOST_WORLD_SIZE), body)
        return None

    def _extras(self, meta: dict[str, Any], body: bytes) -> Answer:
        del body
        world_size = fields.integer(meta, "world_size", 1, fields.MOST_WORLD_SIZE)
        return self.upload(meta).extras(world_size, fields.timeout_s(meta))

    def _seal(self, meta: dict[str, Any], body: bytes) -> Answer:
        if len(body) % 4:
            raise frames.ProtocolError(f"SEAL with {len(body)} bytes, which is no multiple of 4")
        return pack("Q", self.upload(meta).seal(unpack("I", body), fields.timeout_s(meta)))

    def _publish(self, meta: dict[str, Any], body: bytes) -> Answer:
        run, step = self._here(), fields.step(meta)
        index = fields.integer(meta, "node_index", 0, fields.MOST_NODES - 1, 0)
        checkpoint = run.publish(step, body, index, self._session, buffers=self._node.settings.buffers)
        size = checkpoint.manifest.size_bytes
        self._node.log.info("published", run=run.name, step=step, size_bytes=size, blocks=checkpoint.blocks)
        return None

    def _abort(self, meta: dict[str, Any], body: bytes) -> Answer:
        del body
        last = fields.integer(meta, "attempt", 0, MOST_STEP, MOST_STEP)
        self._here().abort(fields.step(meta), self._session, last)
        return None

    def _delete(self, meta: dict[str, Any], body: bytes) -> Answer:
        del body
        self._here().delete(fields.step(meta), self._session)
        return None

    # --- reading --------------------------------------------------------------------------------------------------

    def _steps(self, meta: dict[str, Any], body: bytes) -> Answer:
        del meta, body
        run = self._opened()
        if run is None:
            return {"steps": []}
        with run.lock:
            found = sorted(run.checkpoints.items())[-_MOST_LISTED_STEPS:]
        rows = [{"step": s, "size_bytes": c.manifest.size_bytes, "state": c.state} for s, c in found]
        return {"steps": rows, "writes_on": bool(self._node.writeback.workers)}

    def _manifest(self, meta: dict[str, Any], body: bytes) -> Answer:
        del body
        return self.checkpoint(meta).document

    # --- the node -------------------------------------------------------------------------------------------------

    def _runs(self, meta: dict[str, Any], body: bytes) -> Answer:
        del meta, body
        names = sorted(run.name for run in self._node.runs if run.checkpoints)
        return {"runs": names[:_MOST_LISTED_RUNS], "more": max(0, len(names) - _MOST_LISTED_RUNS)}

    def _status(self, meta: dict[str, Any], body: bytes) -> Answer:
        del meta, body
        return self._node.status()


def _columns(kind: Kind, body: bytes, row_bytes: int) -> tuple[array[int], array[int], bytes]:
    """Chunk indices, digests, and what follows them, of as many chunks as there are."""
    if len(body) % row_bytes:
        raise frames.ProtocolError(f"{kind.name} with {len(body)} bytes, which is no multiple of {row_bytes}")
    count = len(body) // row_bytes
    return unpack("I", body[: 4 * count]), unpack("Q", body[4 * count : 12 * count]), body[12 * count :]


def unpack(code: str, data: bytes) -> array[int]:
    """Little-endian numbers: "I" has 4 bytes, "Q" has 8."""
    numbers = array(code)
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def pack(code: str, numbers: list[int]) -> bytes:
    packed = array(code, numbers)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
