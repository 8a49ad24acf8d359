"""Chunks that some checkpoint here has already, of whatever step and run: found by digest, shared after a proof.

A digest of 64 bits proves nothing: two contents may have the same one, by chance or on purpose, and whoever knows a
digest need not have the bytes. So the client shows a keyed hash of its bytes, and only where the node's own bytes have
the same one is the block shared. Neither side learns anything of bytes that it does not have.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Sequence

from deepvm.memnode.errors import RequestRefused
from deepvm.memnode.monitoring.counters import Counters
from deepvm.memnode.monitoring.log import Log
from deepvm.memnode.storage.arena import Arena
from deepvm.memnode.storage.upload import Upload
from deepvm.protocol import frames

MOST_OFFERED = 256  # chunks of one request: hashing so many takes a second or two
MOST_FALSE = 8  # proofs that fail on one connection; then nothing is hashed for it any more


class Dedup:
    """What one connection offers. Nothing is remembered between its requests but how often it was wrong."""

    def __init__(self, arena: Arena, key: bytes, counters: Counters, log: Log) -> None:
        self._arena, self._key, self._counters, self._log = arena, key, counters, log
        self._false = 0

    def candidates(self, upload: Upload, chunks: Sequence[int], digests: Sequence[int]) -> list[int]:
        """The chunks whose digests are those of blocks here."""
        _check_count(chunks)
        self._counters.add(offered_chunks=len(chunks))
        lengths = [upload.length(chunk) for chunk in chunks]
        known = self._arena.contains(zip(digests, lengths, strict=True))
        return [chunk for chunk, here in zip(chunks, known, strict=True) if here]

    def link(self, upload: Upload, offers: Iterable[tuple[int, int, bytes]]) -> list[int]:
        """Share the blocks of which a chunk, its digest and the proof of its content tell; the chunks that are."""
        offers = list(offers)
        _check_count(offers)
        linked = []
        for chunk, digest, proof in offers:
            block = self._arena.hold_content((digest, upload.length(chunk)))
            if block is None:
                continue
            if self._has(block, upload.length(chunk), proof):
                upload.share(chunk, block, digest)
                linked.append(chunk)
        self._counters.add(linked_chunks=len(linked))
        return linked

    def _has(self, block: int, length: int, proof: bytes) -> bool:
        """Whether the client has what is in the block. If not, the reference to it is given back."""
        same = False
        try:
            if self._false < MOST_FALSE:
                with self._arena.view(block, length) as view:
                    same = hmac.compare_digest(frames.content_proof(self._key, [view]), proof)
                if not same:
                    self._false += 1
                    self._counters.add(false_proofs=1)
                    self._log.warning("false proof", block=block, times=self._false)
        finally:
            if not same:
                self._arena.drop(block)
        return same


def _check_count(chunks: Sequence[object]) -> None:
    if len(chunks) > MOST_OFFERED:
        raise RequestRefused("failed", f"{len(chunks)} chunks were offered at once, {MOST_OFFERED} are allowed")
