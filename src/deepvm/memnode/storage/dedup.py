"""Share chunks that the node has already, of any step and run: offers of a client in, shared chunks out.

A digest of 64 bits proves nothing: two contents may have the same one, by chance or on purpose, and a client may know a
digest without having the bytes. So the client sends a keyed hash of its bytes, and a block is shared only if the node's
bytes have the same hash. Neither side learns anything of bytes that it does not have.
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

MOST_OFFERED = 256  # chunks of one request: hashing them takes a second or two
MOST_FALSE = 8  # wrong proofs of one connection; then nothing is hashed for it any more


class Dedup:
    """Answers the offers of one connection. Between its requests it keeps only the number of wrong proofs."""

    def __init__(self, arena: Arena, key: bytes, counters: Counters, log: Log) -> None:
        self._arena, self._key, self._counters, self._log = arena, key, counters, log
        self._false = 0

    def candidates(self, upload: Upload, chunks: Sequence[int], digests: Sequence[int]) -> list[int]:
        """Return the chunks whose digests and lengths are those of blocks of the node."""
        _check_count(chunks)
        self._counters.add(offered_chunks=len(chunks))
        lengths = [upload.length(chunk) for chunk in chunks]
        known = self._arena.contains(zip(digests, lengths, strict=True))
        return [chunk for chunk, found in zip(chunks, known, strict=True) if found]

    def link(self, upload: Upload, offers: Iterable[tuple[int, int, bytes]]) -> list[int]:
        """Share the blocks of chunks whose proofs fit; return those chunks. An offer is chunk, digest and proof."""
        offers = list(offers)
        _check_count(offers)
        linked = []
        for chunk, digest, proof in offers:
            block = self._arena.hold_content((digest, upload.length(chunk)))
            if block is not None and self._has(block, upload.length(chunk), proof):
                upload.share(chunk, block, digest)
                linked.append(chunk)
        self._counters.add(linked_chunks=len(linked))
        return linked

    def _has(self, block: int, length: int, proof: bytes) -> bool:
        """True if the client has the block's bytes; else drop the reference to it."""
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
