"""Chunks that only other nodes have, fetched with this node's token and what it keeps of the run's key."""

from __future__ import annotations

import ssl

from deepvm.errors import NotFound, StoreError
from deepvm.memnode.peer_rule import PeerRule
from deepvm.protocol.frames import Kind
from deepvm.protocol.placement import replica_nodes
from deepvm.store.base import Manifest
from deepvm.store.memory.connection import Connection

_CONNECT_S = 5.0
_TIMEOUT_S = 30.0
MOST_ASKED = 3  # homes of one chunk: a manifest that lists thousands must not keep the other runs from the disk


class Peers:
    """Connections to the nodes that share a checkpoint's chunks, opened when first needed. For one thread."""

    def __init__(
        self, run: str, verifier: str, rule: PeerRule, *, own_index: int, token: str | None, tls: ssl.SSLContext | None
    ) -> None:
        self._run, self._verifier, self._rule, self._own = run, verifier, rule, own_index
        self._token, self._tls = token, tls
        self._connections: dict[str, Connection] = {}
        self._failed: dict[str, StoreError] = {}  # not dialled again for this checkpoint

    def fetch(self, manifest: Manifest, chunk: int, into: memoryview) -> None:
        """Fill ``into`` from the first of the chunk's nodes that has it; the connection verified its digest."""
        problem: StoreError = NotFound(f"no node has chunk {chunk} of step {manifest.step}")
        homes = replica_nodes(chunk, len(manifest.nodes), manifest.replicas)
        for number in [home for home in homes if home != self._own][:MOST_ASKED]:
            address = manifest.nodes[number]
            try:
                meta = {"step": manifest.step, "chunk": chunk}
                self._connection(address).read_into(Kind.GET, meta, into, manifest.digests[chunk])
                return
            except StoreError as error:
                problem = error
                if not isinstance(error, NotFound):
                    self._failed[address] = error
                self._forget(address)
        raise problem

    def _connection(self, address: str) -> Connection:
        connection = self._connections.get(address)
        if connection is None:
            if address in self._failed:
                raise self._failed[address]
            self._rule.check(address)
            connection = Connection(
                address, token=self._token, tls=self._tls, connect_s=_CONNECT_S, progress_s=_TIMEOUT_S
            )
            self._connections[address] = connection
            connection.open_to_read(self._run, self._verifier)
        return connection

    def _forget(self, address: str) -> None:
        connection = self._connections.pop(address, None)
        if connection is not None:
            connection.close()

    def close(self) -> None:
        for address in list(self._connections):
            self._forget(address)
