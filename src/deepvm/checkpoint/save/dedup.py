"""Whether a save offers its chunks by content before it sends them, and how.

What a node has already, of another step or of another run, need not be sent again. Runs that have something in common
with others find it with their first saves; where nothing is found nothing is offered any more, so that training which
changes every weight pays nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from deepvm.protocol import frames
from deepvm.store.memory.buffers import BufferGroup, views_of
from deepvm.store.memory.connection import Connection, Send
from deepvm.store.memory.upload import link, offer

AT_ONCE = 32  # chunks of one offer: they are read twice, and far more would delay the first byte
AGAIN_SAVES = 64  # a run that found nothing looks again after so many
_WORTH = 64  # offers go on while at least one byte of so many is found
_WORTH_PARTIAL = 16  # and a save may begin with little room where one byte of so many needed none


class Source(Protocol):
    def hand_over(self, chunk: int, offset: int, send: Send) -> int: ...


class Outcome(Protocol):
    """What came of a save at one node."""

    @property
    def bytes_offered(self) -> int: ...
    @property
    def bytes_linked(self) -> int: ...
    @property
    def bytes_kept(self) -> int: ...
    @property
    def bytes_sent(self) -> int: ...


class DedupHistory:
    """What the saves of one run found so far."""

    def __init__(self) -> None:
        self._layout = ""
        self._found = True
        self._shared = False
        self._saves = 0

    def begin(self, layout: str) -> bool:
        """Whether the save that begins shall offer its chunks: at first, where others did so with success, when the
        state is laid out anew, and now and then."""
        self._saves += 1
        if layout != self._layout or self._saves > AGAIN_SAVES:
            self._layout, self._found, self._saves = layout, True, 0
        return self._found

    @property
    def partial_reservation(self) -> bool:
        """Whether much of the save that begins may be at the nodes already."""
        return self._found or self._shared

    def learn(self, saved: Collection[Outcome], *, failed: bool) -> None:
        offered, linked = sum(one.bytes_offered for one in saved), sum(one.bytes_linked for one in saved)
        if offered or not failed:  # where nothing was offered, all was kept, or no node takes offers
            self._found = 0 < offered <= linked * _WORTH
        spared = linked + sum(one.bytes_kept for one in saved)
        self._shared = spared * _WORTH_PARTIAL >= spared + sum(one.bytes_sent for one in saved) > 0


def link_known(
    connection: Connection, source: Source, step: int, chunks: Sequence[int], digests: Sequence[int]
) -> list[int]:
    """Offer chunks, and prove those that the node may have; the ones that it has, and that need not be sent."""
    candidates = set(offer(connection, step, chunks, [digests[chunk] for chunk in chunks]))
    known = [chunk for chunk in chunks if chunk in candidates]
    if not known:
        return []
    key = frames.content_key(*connection.nonces)
    proofs = [_proof(source, chunk, key) for chunk in known]
    return link(connection, step, known, [digests[chunk] for chunk in known], proofs)


def _proof(source: Source, chunk: int, key: bytes) -> bytes:
    proof = b""

    def prove(strips: Sequence[BufferGroup]) -> int:
        nonlocal proof
        proof = frames.content_proof(key, views_of(strips))
        return 0

    source.hand_over(chunk, 0, prove)
    return proof
