"""Requests other than for chunks: the fields of a frame in, an answer for connection.py out."""

from __future__ import annotations

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
from deepvm.store.base import MOST_NODES, MOST_STEP, MOST_WORLD_SIZE

if TYPE_CHECKING:
    from deepvm.memnode.server import MemoryNode

Answer = dict[str, Any] | bytes | None  # the meta of an OK, the body of a DATA, or a bare OK
Meta = dict[str, Any]
_OFFER_BYTES = 4 + 8  # of each chunk: its index and its digest
_PROOF_BYTES = 32
_MOST_LISTED_STEPS = 600  # an answer's meta has a limit; beyond it only the newest are listed
_MOST_LISTED_RUNS = 600
_CHECK_STOP_S = 0.5  # how often a request that waits checks whether the node is stopping, or its client is gone
_MOST_WATCH_S = 60.0  # for which STEPS waits for a change


class Requests:
    """The requests of one connection, and the run that it has open. ``_on_open`` answers Kind.OPEN, and so on.
    ``is_gone`` is True once the client has left: a request that waits ends then, and gives its place back."""

    def __init__(self, node: MemoryNode, node_nonce: str, client_nonce: str, *, is_gone: Callable[[], bool]) -> None:
        self._node, self._nonces, self._is_gone = node, (node_nonce, client_nonce), is_gone
        self._name: str | None = None
        self._run: Run | None = None
        self._verifier: str | None = None  # of a run that did not exist when it was opened
        self._session: str | None = None  # only of clients that write
        self._joined: Upload | None = None  # the upload that this connection began or joined, and no later one
        self._dedup = Dedup(node.arena, frames.content_key(*self._nonces), node.counters, node.log)

    def answer(self, kind: Kind, meta: Meta, body: bytes) -> Answer:
        handler = getattr(self, f"_on_{kind.name.lower()}", None)
        if handler is None:
            raise frames.ProtocolError(f"a client does not send {kind.name} here")
        answer: Answer = handler(meta, body)
        return answer

    def leave(self) -> None:
        if self._run is not None:
            with self._run.lock:
                self._run.users -= 1
            self._run = None

    # --- runs -----------------------------------------------------------------------------------------------------

    def _on_open(self, meta: Meta, _body: bytes) -> None:
        name, write = fields.run_name(meta), fields.flag(meta, "write")
        session = fields.text(meta, "session", 200) if write or meta.get("session") else ""
        proof = fields.optional_hexadecimal(meta, "proof")
        verifier = fields.optional_hexadecimal(meta, "verifier")
        if verifier is not None:
            verifier = frames.masked(verifier, self._node.settings.token, *self._nonces)
        run = self._node.runs.find(name)
        self._check_key(run, name, proof, verifier)
        if run is None and write and verifier is not None:
            run = self._node.runs.add(name, verifier)
            self._check_key(run, name, proof, verifier)  # two clients may bring one name at once
        self.leave()
        self._name, self._verifier, self._session = name, verifier, None
        self._enter(run)
        if write and run is not None:
            run.claim(session)
            self._session = session

    def _check_key(self, run: Run | None, name: str, proof: str | None, verifier: str | None) -> None:
        if not may_open(run, name, self._nonces, proof=proof, verifier=verifier):
            self._node.counters.add(failed_logins=1)
            time.sleep(self._node.settings.limits.failure_delay_s)
            raise RequestRefused("denied", f"no run {name!r}, or wrong key")

    def _enter(self, run: Run | None) -> None:
        self._run = run
        if run is not None:
            with run.lock:
                run.users += 1

    def _find_run(self) -> Run | None:
        """Return the run that was opened; None if it does not exist yet."""
        if self._name is None:
            raise RequestRefused("failed", "no run is open: OPEN comes first")
        if self._run is None:
            run = self._node.runs.find(self._name)
            if run is not None and self._verifier is not None and frames.same(run.verifier, self._verifier):
                self._enter(run)
        return self._run

    def _open_run(self) -> Run:
        run = self._find_run()
        if run is None:
            raise RequestRefused("not-found", f"run {self._name!r} has no checkpoint here")
        return run

    def upload(self, meta: Meta) -> Upload:
        run, step, joined = self._open_run(), fields.step(meta), self._joined
        if joined is not None and joined.begin.step == step and joined.session == self._session:
            return joined
        return run.upload(step, self._session)

    def checkpoint(self, meta: Meta) -> Checkpoint:
        return self._open_run().checkpoint(fields.step(meta))

    # --- saving ---------------------------------------------------------------------------------------------------

    def _on_begin(self, meta: Meta, _body: bytes) -> None:
        settings = self._node.settings
        begin = fields.begin(meta, settings.block_bytes)
        if self._node.stopping:
            raise RequestRefused("stopping", "the node is stopping: no new upload begins")
        run, room_s = self._open_run(), settings.limits.room_s
        self._joined = run.begin(begin, self._session, buffers=settings.buffers, room_s=room_s)

    def _on_keep(self, meta: Meta, body: bytes) -> None:
        chunks, digests, _ = _columns(Kind.KEEP, body, _OFFER_BYTES)
        upload = self.upload(meta)
        upload.keep(self._open_run().checkpoint(fields.step(meta, "from_step")), chunks, digests)

    def _on_offer(self, meta: Meta, body: bytes) -> bytes:
        chunks, digests, _ = _columns(Kind.OFFER, body, _OFFER_BYTES)
        return frames.pack("I", self._dedup.candidates(self.upload(meta), chunks, digests))

    def _on_link(self, meta: Meta, body: bytes) -> bytes:
        chunks, digests, rest = _columns(Kind.LINK, body, _OFFER_BYTES + _PROOF_BYTES)
        proofs = (rest[start : start + _PROOF_BYTES] for start in range(0, len(rest), _PROOF_BYTES))
        return frames.pack("I", self._dedup.link(self.upload(meta), zip(chunks, digests, proofs, strict=True)))

    def _on_extra(self, meta: Meta, body: bytes) -> None:
        self.upload(meta).add_extra(fields.integer(meta, "rank", 0, MOST_WORLD_SIZE), body)

    def _on_extras(self, meta: Meta, _body: bytes) -> bytes:
        world_size = fields.integer(meta, "world_size", 1, MOST_WORLD_SIZE)
        return self.upload(meta).extras(world_size, fields.timeout_s(meta), self._is_gone)

    def _on_seal(self, meta: Meta, body: bytes) -> bytes:
        chunks, timeout_s = frames.unpack("I", body), fields.timeout_s(meta)
        return frames.pack("Q", self.upload(meta).seal(chunks, timeout_s, self._is_gone))

    def _on_publish(self, meta: Meta, body: bytes) -> None:
        run, step = self._open_run(), fields.step(meta)
        index = fields.integer(meta, "node_index", 0, MOST_NODES - 1, 0)
        checkpoint = run.publish(step, body, index, self._session, buffers=self._node.settings.buffers)
        size = checkpoint.manifest.size_bytes
        self._node.log.info("published", run=run.name, step=step, size_bytes=size, blocks=checkpoint.blocks)

    def _on_abort(self, meta: Meta, _body: bytes) -> None:
        last = fields.integer(meta, "attempt", 0, MOST_STEP, MOST_STEP)
        self._open_run().abort(fields.step(meta), self._session, last)

    def _on_delete(self, meta: Meta, _body: bytes) -> None:
        self._open_run().delete(fields.step(meta), self._session, leftover=fields.flag(meta, "leftover"))

    # --- reading --------------------------------------------------------------------------------------------------

    def _on_steps(self, meta: Meta, _body: bytes) -> Answer:
        timeout_s, writes_on = fields.timeout_s(meta, most_s=_MOST_WATCH_S), bool(self._node.writeback.workers)
        if "after" in meta:
            self._await_change(fields.integer(meta, "after", 0, MOST_STEP), timeout_s)
        run = self._find_run()
        if run is None:
            return {"steps": [], "writes_on": writes_on, "version": 0}
        with run.lock:
            found, version = sorted(run.checkpoints.items())[-_MOST_LISTED_STEPS:], run.version
        rows = [{"step": s, "size_bytes": c.manifest.size_bytes, "state": c.state, "whole": c.whole} for s, c in found]
        return {"steps": rows, "writes_on": writes_on, "version": version}

    def _await_change(self, version: int, timeout_s: float) -> None:
        """Wait while the list is still that of a version. A run that does not exist has an empty list of version 0."""
        ends_s = time.monotonic() + timeout_s
        while not self._node.stopping and not self._is_gone() and (left_s := ends_s - time.monotonic()) > 0:
            run, wait_s = self._find_run(), min(left_s, _CHECK_STOP_S)
            if (0 if run is None else run.version) != version:
                return
            if run is not None:
                run.wait_for_change(version, wait_s)
            elif self._node.runs.find(str(self._name)) is None:
                self._node.runs.wait_for(str(self._name), wait_s)
            else:  # it is of another key, and stays invisible
                time.sleep(wait_s)

    def _on_manifest(self, meta: Meta, _body: bytes) -> bytes:
        return self.checkpoint(meta).document

    # --- the node -------------------------------------------------------------------------------------------------

    def _on_runs(self, _meta: Meta, _body: bytes) -> Answer:
        names = sorted(run.name for run in self._node.runs if run.checkpoints)
        return {"runs": names[:_MOST_LISTED_RUNS], "more": max(0, len(names) - _MOST_LISTED_RUNS)}

    def _on_status(self, _meta: Meta, _body: bytes) -> Answer:
        return self._node.status()


def _columns(kind: Kind, body: bytes, row_bytes: int) -> tuple[array[int], array[int], bytes]:
    """Split a body into chunk indices, digests, and the rest: a row for each chunk, stored column by column."""
    if len(body) % row_bytes:
        raise frames.ProtocolError(f"{kind.name} with {len(body)} bytes, which is not a multiple of {row_bytes}")
    count = len(body) // row_bytes
    return frames.unpack("I", body[: 4 * count]), frames.unpack("Q", body[4 * count : 12 * count]), body[12 * count :]
