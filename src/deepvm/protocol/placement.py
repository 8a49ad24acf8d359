"""Which memory nodes keep which chunk: chunk k lives on node k mod n, and its replicas on the nodes after it."""

from __future__ import annotations

from dataclasses import dataclass


def replica_nodes(chunk: int, nodes: int, replicas: int) -> list[int]:
    """List the nodes that keep a chunk, the primary first."""
    return [(chunk + j) % nodes for j in range(min(replicas, nodes))]


def minimum_nodes(nodes: int, replicas: int) -> int:
    """Return how many nodes must answer so that every chunk has one of its replicas among them."""
    return max(1, nodes - replicas + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Which chunks are this node's: those k for which (k + j) % nodes is its index, j < replicas."""

    nodes: int = 1
    index: int = 0
    replicas: int = 1

    def has(self, chunk: int) -> bool:
        return (self.index - chunk) % self.nodes < self.replicas

    def chunks(self, chunks: int) -> list[int]:
        """List this node's part of the chunks 0 to ``chunks - 1``."""
        return [chunk for chunk in range(chunks) if self.has(chunk)]

    def count(self, chunks: int) -> int:
        whole, rest = divmod(chunks, self.nodes)
        return whole * min(self.replicas, self.nodes) + sum(self.has(chunk) for chunk in range(rest))
