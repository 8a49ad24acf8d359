"""The protocol as docs/protocol.md tells it, once more: one connection, one request at a time, for the tests.

What deepvm itself uses is store.connection; that both understand the node shows that the page is right.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import socket
import ssl
import struct
from collections.abc import Mapping
from typing import Any

import xxhash

from deepvm.errors import AccessDenied, Corrupt, StoreUnavailable
from deepvm.protocol import frames
from deepvm.protocol.addresses import split_address
from deepvm.protocol.frames import Kind


class PlainClient:
    """Every failure is a StoreError; every wait has the deadline given at birth."""

    def __init__(
        self, address: str, *, token: str | None = None, tls: ssl.SSLContext | None = None, timeout_s: float = 10.0
    ) -> None:
        self.address = address
        self._request = 0
        self._head = b""  # header and meta of the last answer
        self._keys: tuple[bytes, bytes] | None = None  # for tags, client's and server's
        self._tagged_out = self._tagged_in = 0
        self._of_chunks = False  # the answer is a chunk, which has no tag of its own
        self._token = token
        host, port = split_address(address)
        try:
            self.sock: socket.socket = socket.create_connection((host, port), timeout=timeout_s)
        except OSError as error:
            raise StoreUnavailable(f"no memory node answers at {address}: {error.strerror or error}") from None
        try:
            if tls is not None:
                self.sock = tls.wrap_socket(self.sock, server_hostname=host)
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
            self.sock.close()

    def _shake_hands(self) -> None:
        kind, hello, _ = self._receive()
        greeting = self._head
        assert (kind, hello["version"]) == (Kind.HELLO, 2)
        self.node_nonce, self.client_nonce = hello["nonce"], frames.new_nonce()
        self.block_bytes = hello["block_bytes"]
        host, port = self.sock.getpeername()[:2]
        dialled = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._seen = f"{self.node_nonce}/{self.client_nonce}/{hashlib.sha256(greeting).hexdigest()}/{dialled}"
        auth = {"version": 2, "nonce": self.client_nonce, "address": dialled, "proof": ""}
        if hello["token"]:
            if self._token is None:
                raise AccessDenied(f"the memory node at {self.address} asks for a token")
            auth["proof"] = self._keyed("client").hex()
        _, meta, _ = self.ask(Kind.AUTH, auth)
        if hello["token"]:
            assert meta["proof"] == self._keyed("server").hex()
            self._keys = self._keyed("client-tags"), self._keyed("server-tags")

    def _keyed(self, purpose: str) -> bytes:
        assert self._token is not None
        return hmac.digest(self._token.encode(), f"deepvm/2/node/{purpose}/{self._seen}".encode(), "sha256")

    def _tag(self, data: bytes) -> bytes:
        """What follows these bytes, which are sent next."""
        if self._keys is None:
            return b""
        self._tagged_out += 1
        numbered = struct.pack("!Q", self._tagged_out) + data
        return hashlib.blake2b(numbered, key=self._keys[0], digest_size=16).digest()

    def tagged(self, head: bytes) -> bytes:
        """A header and its meta, with their tag in between."""
        return head[:32] + self._tag(head) + head[32:]

    def _take_tag(self) -> bytes:
        return b"" if self._keys is None else self.exactly(16)

    def _check(self, data: bytes, tag: bytes) -> None:
        if self._keys is not None:
            self._tagged_in += 1
            numbered = struct.pack("!Q", self._tagged_in) + data
            assert tag == hashlib.blake2b(numbered, key=self._keys[1], digest_size=16).digest()

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
            head = frames.encode(kind, self._request, meta, len(body), xxhash.xxh3_64_intdigest(body) if body else 0)
            self._of_chunks = kind is Kind.GET
            is_document = bool(body) and kind is not Kind.MEND
            self.sock.sendall(self.tagged(head) + body)
            self.sock.sendall(self._tag(hashlib.sha256(body).digest()) if is_document else b"")
            answer, fields, found = self._receive(into, digest)
        except OSError as error:
            raise StoreUnavailable(f"the memory node at {self.address} does not answer: {error}") from None
        if answer is Kind.ERROR:
            frames.raise_error(fields)
        return answer, fields, found

    def _receive(self, into: memoryview | None = None, digest: int | None = None) -> tuple[Kind, dict[str, Any], bytes]:
        header = self.exactly(frames.HEADER.size)
        frame = frames.decode_header(header)
        tag = self._take_tag()
        self._head = header + self.exactly(frame.meta_bytes)
        self._check(self._head, tag)
        meta = frames.decode_meta(self._head[frames.HEADER.size :])
        body = b""
        if frame.body_bytes:
            if into is None:
                body = self.exactly(frame.body_bytes)
            elif frame.body_bytes == len(into):
                self._fill(into)
            else:
                raise frames.ProtocolError(f"{frame.body_bytes} bytes came, {len(into)} were asked for")
            if not self._of_chunks:
                self._check(hashlib.sha256(body).digest(), self._take_tag())
            wanted = frame.digest if digest is None else digest
            if xxhash.xxh3_64_intdigest(body if into is None else into) != wanted:
                raise Corrupt(f"what {self.address} sent is damaged")
        return frame.kind, meta, body

    def exactly(self, count: int) -> bytes:
        data = bytearray(count)
        self._fill(memoryview(data))
        return bytes(data)

    def _fill(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            count = self.sock.recv_into(view[done:])
            if not count:
                raise ConnectionError("it closed the connection")
            done += count
