"""Decide whether a save offers its chunks to memory nodes by content before it sends them.

Input: what came of the saves before. A node need not receive what it has already, of another step or another run. If
offers find nothing, saves make none for a while: training that changes every weight pays nothing.
"""

from __future__ import annotations

from collections.abc import Collection

from deepvm.checkpoint.save.sender_threads import NodeUpload

RETRY_SAVES = 64  # a run that found nothing offers again after this many saves
_WORTH = 64  # offers continue while they find at least 1/64 of the bytes
_WORTH_PARTIAL = 16  # a save may begin with little room if 1/16 of the last one's bytes needed none


class DedupHistory:
    """What the saves of one run found so far."""

    def __init__(self) -> None:
        self._layout = ""
        self._found = True
        self._shared = False
        self._saves = 0

    def begin(self, layout: str) -> bool:
        """True if the save that begins shall offer its chunks: at first, while offers find something, with a new
        layout, and now and then."""
        self._saves += 1
        if layout != self._layout or self._saves > RETRY_SAVES:
            self._layout, self._found, self._saves = layout, True, 0
        return self._found

    @property
    def partial_reservation(self) -> bool:
        """True if the nodes may have much of the save that begins already."""
        return self._found or self._shared

    def learn(self, uploads: Collection[NodeUpload], *, failed: bool) -> None:
        """Record what a save moved to each node."""
        offered, linked = sum(one.bytes_offered for one in uploads), sum(one.bytes_linked for one in uploads)
        if offered or not failed:  # if nothing was offered, all was kept
            self._found = 0 < offered <= linked * _WORTH
        spared = linked + sum(one.bytes_kept for one in uploads)
        self._shared = spared * _WORTH_PARTIAL >= spared + sum(one.bytes_sent for one in uploads) > 0
