"""Chunks that only other nodes have, fetched with this node's token and what it keeps of the run's key."""

from __future__ import annotations

import ssl

from deepvm.errors import NotFound, StoreError
from deepvm.memnode.wire import Kind
from deepvm.store.base import Manifest
from deepvm.store.connection import Connection

_TIMEOUT_S = 30.0


class Peers:
    """Connections to the nodes that share a checkpoint's chunks, opened when first needed. For one thread."""

    def __init__(
        self, run: str, verifier: str, *, own_index: int, token: str | None, tls: ssl.SSLContext | None
    ) -> None:
        self._run, self._verifier, self._own = run, verifier, own_index
        self._token, self._tls = token, tls
        self._connections: dict[str, Connection] = {}

    def fetch(self, manifest: Manifest, chunk: int, into: memoryview) -> None:
        """Fill ``into`` from the first of the chunk's nodes that has it; the connection verified its digest."""
        nodes = len(manifest.nodes)
        problem: StoreError = NotFound(f"no node has chunk {chunk} of step {manifest.step}")
        for number in ((chunk + replica) % nodes for replica in range(manifest.replicas)):
            if number == self._own:
                continue
            address = manifest.nodes[number]
            try:
                meta = {"step": manifest.step, "chunk": chunk}
                self._connection(address).read_into(Kind.GET, meta, into, manifest.digests[chunk])
                return
            except StoreError as error:
                problem = error
                self._forget(address)
        raise problem

    def _connection(self, address: str) -> Connection:
        connection = self._connections.get(address)
        if connection is None:
            connection = Connection(address, token=self._token, tls=self._tls, progress_s=_TIMEOUT_S)
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
