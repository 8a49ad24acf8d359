"""Fetch chunks that only other nodes have, with this node's token and its verifier of the run's key."""

from __future__ import annotations

import ssl

from deepvm.errors import NotFound, StoreError
from deepvm.memnode.peer_rule import PeerRule
from deepvm.memnode.storage.run import Run
from deepvm.protocol.placement import replica_nodes
from deepvm.store.base import Manifest
from deepvm.store.memory.connection import Connection

_CONNECT_S = 5.0
_TIMEOUT_S = 30.0
MOST_ASKED = 3  # nodes for one chunk: a manifest that lists thousands must not keep other runs from the disk


class Peers:
    """Connections of node 0 to the others that share a checkpoint, opened when first needed. For one thread."""

    def __init__(self, run: Run, rule: PeerRule, *, token: str | None, tls: ssl.SSLContext | None) -> None:
        self._run, self._rule, self._token, self._tls = run, rule, token, tls
        self._connections: dict[str, Connection] = {}
        self._failed: dict[str, StoreError] = {}  # not dialled again for this checkpoint

    def fetch(self, manifest: Manifest, chunk: int, into: memoryview) -> None:
        """Fill ``into`` from the first of the chunk's nodes that has it; the connection verified its digest."""
        problem: StoreError = NotFound(f"no node has chunk {chunk} of step {manifest.step}")
        replicas = replica_nodes(chunk, len(manifest.nodes), manifest.replicas)
        for address in [manifest.nodes[index] for index in replicas if index != 0][:MOST_ASKED]:
            try:
                self._connection(address).read_chunk(manifest, chunk, into)
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
            connection = Connection.connect(
                address, token=self._token, tls=self._tls, connect_s=_CONNECT_S, progress_s=_TIMEOUT_S
            )
            self._connections[address] = connection
            connection.open_to_read(self._run.name, self._run.verifier)
        return connection

    def _forget(self, address: str) -> None:
        connection = self._connections.pop(address, None)
        if connection is not None:
            connection.close()

    def close(self) -> None:
        for address in list(self._connections):
            self._forget(address)
