"""Which chunks of a checkpoint belong to which of the nodes that share it."""

from __future__ import annotations

from dataclasses import dataclass

from deepvm.store.base import Manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Which chunks are this node's: those k for which (k + j) % nodes is its index, j < replicas."""

    nodes: int = 1
    index: int = 0
    replicas: int = 1

    def has(self, chunk: int) -> bool:
        return (self.index - chunk) % self.nodes < self.replicas

    def count(self, chunks: int) -> int:
        whole, rest = divmod(chunks, self.nodes)
        return whole * min(self.replicas, self.nodes) + sum(self.has(chunk) for chunk in range(rest))

    @classmethod
    def of(cls, manifest: Manifest, index: int) -> Share:
        return cls(nodes=max(1, len(manifest.nodes)), index=index, replicas=manifest.replicas)
