"""Limit the memory beside the blocks: for documents that arrive (serving/) and documents that are kept (storage/)."""

from __future__ import annotations

import sys
import threading
import time

from deepvm.memnode.errors import PeerGone, RequestRefused
from deepvm.store.base import Manifest
from deepvm.units import format_bytes

FREE_BYTES = 256 * 2**10  # of each document: nearly all are smaller, and do not wait for large ones
STATE_BYTES = 160  # that a rank's state takes beside its text: two objects, and a place in a table
_CHUNK_BYTES = 200  # that a chunk of a checkpoint takes: its digest, and places in two tables
_CHECKPOINT_BYTES = 4096


class Budget:
    """Bytes of documents that may arrive at once, from all clients together."""

    def __init__(self, most_bytes: int) -> None:
        self._left = most_bytes
        self._changed = threading.Condition()

    def take(self, count: int, timeout_s: float) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._left >= count, timeout_s):
                raise PeerGone("too many documents arrive at once")
            self._left -= count

    def give_back(self, count: int) -> None:
        with self._changed:
            self._left += count
            self._changed.notify_all()


class Room:
    """One document's part of the budget. It grows as bytes arrive: an announced length alone takes nothing."""

    def __init__(self, budget: Budget) -> None:
        self._budget, self._taken, self._size = budget, 0, 0

    def grow(self, count: int, deadline_s: float) -> None:
        self._size += count
        wanted = max(0, self._size - FREE_BYTES) - self._taken
        if wanted > 0:
            self._budget.take(wanted, max(0.0, deadline_s - time.monotonic()))
            self._taken += wanted

    def __enter__(self) -> Room:
        return self

    def __exit__(self, *_: object) -> None:
        if self._taken:
            self._budget.give_back(self._taken)


class KeptDocuments:
    """Memory of kept documents, of all runs together: manifests, and ranks' states until a commit."""

    def __init__(self, most_bytes: int) -> None:
        self._most, self.used_bytes = most_bytes, 0
        self._lock = threading.Lock()

    def add(self, count: int, what: str, *, force: bool = False) -> None:
        """Add bytes, or refuse. ``force`` is for checkpoints on disk, which are always served."""
        with self._lock:
            if self.used_bytes + count > self._most and not force:
                raise RequestRefused(
                    "no-room",
                    f"{what} takes {format_bytes(count)}; documents take {format_bytes(self.used_bytes)} of "
                    f"{format_bytes(self._most)} already",
                )
            self.used_bytes += count

    def drop(self, count: int) -> None:
        with self._lock:
            self.used_bytes -= count


def cost_of(manifest: Manifest, document: bytes) -> int:
    """Return what a checkpoint takes beside its blocks: the document, its nodes, and a digest and a place for each
    chunk. The parsed facts are not kept."""
    nodes = sum(sys.getsizeof(node) for node in manifest.nodes)
    return len(document) + nodes + _CHUNK_BYTES * len(manifest.digests) + _CHECKPOINT_BYTES
