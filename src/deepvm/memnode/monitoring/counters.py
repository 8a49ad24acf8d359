"""Count what the node does, for status and metrics."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, fields


@dataclass
class Counters:
    """Totals since the start. Several threads may ``add``."""

    bytes_in: int = 0
    bytes_out: int = 0
    saves: int = 0
    aborts: int = 0
    corrupt_chunks: int = 0
    failed_logins: int = 0
    malformed_frames: int = 0
    connections_total: int = 0
    connections_refused: int = 0
    offered_chunks: int = 0
    linked_chunks: int = 0
    false_proofs: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)

    def as_dict(self) -> dict[str, int]:
        return {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name != "_lock"}
