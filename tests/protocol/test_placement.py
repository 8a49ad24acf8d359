"""Which memory nodes keep which chunk: every chunk has its replicas, and a node knows its part."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deepvm.protocol.placement import Share, minimum_nodes, replica_nodes


def test_a_node_by_itself_keeps_every_chunk() -> None:
    assert Share().chunks(3) == [0, 1, 2]
    assert Share().count(3) == 3


@given(chunks=st.integers(0, 30), nodes=st.integers(1, 6), replicas=st.integers(1, 6))
def test_every_chunk_has_its_replicas_and_each_node_knows_and_counts_its_part(
    chunks: int, nodes: int, replicas: int
) -> None:
    replicas = min(replicas, nodes)
    shares = [Share(nodes=nodes, index=index, replicas=replicas) for index in range(nodes)]
    for chunk in range(chunks):
        kept_by = replica_nodes(chunk, nodes, replicas)
        assert kept_by[0] == chunk % nodes
        assert len(set(kept_by)) == replicas
        assert {index for index, share in enumerate(shares) if share.has(chunk)} == set(kept_by)
    assert [share.count(chunks) for share in shares] == [len(share.chunks(chunks)) for share in shares]


@given(nodes=st.integers(1, 6), replicas=st.integers(1, 6))
def test_of_so_many_nodes_any_choice_has_every_chunk_and_of_fewer_one_may_lack_some(nodes: int, replicas: int) -> None:
    least = minimum_nodes(nodes, replicas)
    shares = [Share(nodes=nodes, index=index, replicas=replicas) for index in range(nodes)]
    for first in range(nodes):
        there = [shares[(first + k) % nodes] for k in range(least)]
        assert all(any(share.has(chunk) for share in there) for chunk in range(nodes))
    fewer = shares[: least - 1]
    assert not all(any(share.has(chunk) for share in fewer) for chunk in range(nodes))
