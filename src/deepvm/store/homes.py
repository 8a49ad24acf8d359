"""Which memory nodes keep which chunk: chunk k lives on node k mod n, and its replicas on the nodes after it."""

from __future__ import annotations


def home_nodes(chunk: int, nodes: int, replicas: int) -> list[int]:
    """The nodes that keep a chunk, its first home first."""
    return [(chunk + j) % nodes for j in range(min(replicas, nodes))]


def fewest_nodes(nodes: int, replicas: int) -> int:
    """How many nodes must be left: with fewer, some chunk has none."""
    return max(1, nodes - replicas + 1)
