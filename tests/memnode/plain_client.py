"""The protocol as docs/protocol.md tells it, once more: one connection, one request at a time, for the tests.

What deepvm itself uses is store.connection; that both understand the node shows that the page is right.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Mapping
from typing import Any

import xxhash

from deepvm.errors import AccessDenied, Corrupt, StoreUnavailable
from deepvm.memnode import wire
from deepvm.memnode.addresses import split_address
from deepvm.memnode.wire import Kind


class PlainClient:
    """Every failure is a StoreError; every wait has the deadline given at birth."""

    def __init__(
        self, address: str, *, token: str | None = None, tls: ssl.SSLContext | None = None, timeout_s: float = 10.0
    ) -> None:
        self.address = address
        self._request = 0
        self._token = token
        host, port = split_address(address)
        try:
            self._sock: socket.socket = socket.create_connection((host, port), timeout=timeout_s)
        except OSError as error:
            raise StoreUnavailable(f"no memory node answers at {address}: {error.strerror or error}") from None
        try:
            if tls is not None:
                self._sock = tls.wrap_socket(self._sock, server_hostname=host)
            self._shake_hands()
        except OSError as error:
            self.close()
            raise StoreUnavailable(f"the memory node at {address} does not answer: {error}") from None
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> PlainClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.close()

    def _shake_hands(self) -> None:
        kind, hello, _ = self._receive()
        if kind is not Kind.HELLO:
            raise wire.ProtocolError(f"{self.address} greets with {kind.name}")
        if hello.get("version") != wire.VERSION:
            raise wire.ProtocolError(f"{self.address} speaks version {hello.get('version')}, this is {wire.VERSION}")
        self.node_nonce, self.client_nonce = str(hello.get("nonce")), wire.new_nonce()
        self.block_bytes = int(hello.get("block_bytes", 0))
        nonces = self.node_nonce, self.client_nonce
        auth = {"version": wire.VERSION, "nonce": self.client_nonce, "proof": ""}
        if hello.get("token"):
            if self._token is None:
                raise AccessDenied(f"the memory node at {self.address} wants a token: --token-file or DEEPVM_TOKEN")
            auth["proof"] = wire.proof(self._token, "client", *nonces)
        _, meta, _ = self.ask(Kind.AUTH, auth)
        if self._token is not None and hello.get("token"):
            self._check_node(str(meta.get("proof")), wire.proof(self._token, "node", *nonces))

    def _check_node(self, found: str, wanted: str) -> None:
        if not wire.same(found, wanted):
            raise AccessDenied(f"{self.address} does not know the token: it is not the node it claims to be")

    def ask(
        self,
        kind: Kind,
        meta: Mapping[str, Any] | None = None,
        body: bytes = b"",
        *,
        into: memoryview | None = None,
        digest: int | None = None,
    ) -> tuple[Kind, dict[str, Any], bytes]:
        """Send a request and wait for its answer. A DATA body goes into ``into`` where that is given; ``digest`` is
        what it must have."""
        self._request += 1
        try:
            head = wire.encode(kind, self._request, meta, len(body), xxhash.xxh3_64_intdigest(body) if body else 0)
            self._sock.sendall(head + body)
            answer, fields, found = self._receive(into, digest)
        except OSError as error:
            raise StoreUnavailable(f"the memory node at {self.address} does not answer: {error}") from None
        if answer is Kind.ERROR:
            wire.raise_error(fields)
        return answer, fields, found

    def _receive(self, into: memoryview | None = None, digest: int | None = None) -> tuple[Kind, dict[str, Any], bytes]:
        frame = wire.decode_header(self._exactly(wire.HEADER.size))
        meta = wire.decode_meta(self._exactly(frame.meta_bytes))
        body = b""
        if frame.body_bytes:
            if into is None:
                body = self._exactly(frame.body_bytes)
            elif frame.body_bytes == len(into):
                self._fill(into)
            else:
                raise wire.ProtocolError(f"{frame.body_bytes} bytes came, {len(into)} were asked for")
            wanted = frame.digest if digest is None else digest
            if xxhash.xxh3_64_intdigest(body if into is None else into) != wanted:
                raise Corrupt(f"what {self.address} sent is damaged")
        return frame.kind, meta, body

    def _exactly(self, count: int) -> bytes:
        data = bytearray(count)
        self._fill(memoryview(data))
        return bytes(data)

    def _fill(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            count = self._sock.recv_into(view[done:])
            if not count:
                raise ConnectionError("it closed the connection")
            done += count
