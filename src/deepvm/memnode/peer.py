"""Chunks that only other nodes have, fetched with this node's token and what it keeps of the run's key."""

from __future__ import annotations

import ssl

from deepvm.errors import NotFound, StoreError
from deepvm.memnode.client import NodeClient
from deepvm.memnode.wire import Kind
from deepvm.store.base import Manifest

_TIMEOUT_S = 30.0


class Peers:
    """Connections to the nodes that share a checkpoint's chunks, opened when first needed. For one thread."""

    def __init__(
        self, run: str, verifier: str, *, own_index: int, token: str | None, tls: ssl.SSLContext | None
    ) -> None:
        self._run, self._verifier, self._own = run, verifier, own_index
        self._token, self._tls = token, tls
        self._clients: dict[str, NodeClient] = {}

    def fetch(self, manifest: Manifest, chunk: int, into: memoryview) -> None:
        """Fill ``into`` from the first of the chunk's nodes that has it; the client verified its digest."""
        nodes = len(manifest.nodes)
        problem: StoreError = NotFound(f"no node has chunk {chunk} of step {manifest.step}")
        for number in ((chunk + replica) % nodes for replica in range(manifest.replicas)):
            if number == self._own:
                continue
            address = manifest.nodes[number]
            try:
                client = self._client(address)
                client.ask(Kind.GET, {"step": manifest.step, "chunk": chunk}, into=into, digest=manifest.digests[chunk])
                return
            except StoreError as error:
                problem = error
                self._forget(address)
        raise problem

    def _client(self, address: str) -> NodeClient:
        client = self._clients.get(address)
        if client is None:
            client = NodeClient(address, token=self._token, tls=self._tls, timeout_s=_TIMEOUT_S)
            self._clients[address] = client
            client.open(self._run, self._verifier)
        return client

    def _forget(self, address: str) -> None:
        client = self._clients.pop(address, None)
        if client is not None:
            client.close()

    def close(self) -> None:
        for address in list(self._clients):
            self._forget(address)
