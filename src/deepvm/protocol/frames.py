"""The memory node's wire protocol: frames, limits and proofs. docs/protocol.md specifies it in words.

A frame is a fixed header, a small JSON object (meta) and a body of bytes:

    magic "DVM2" · kind u8 · flags u8 (0) · reserved u16 (0) · request u32 · meta length u32 · body length u64 ·
    digest u64

Every length is checked against its limit before memory is taken for it. ``digest`` is xxh3-64 of the body. Where there
is a token, tags (handshake.py) follow headers, documents, and each digest in a PUTS body; lengths do not count them.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import xxhash

from deepvm import strict_json as strict
from deepvm.errors import AccessDenied, Corrupt, NotFound, StoreError, StoreUnavailable
from deepvm.protocol import handshake

MAGIC = b"DVM2"
HEADER = struct.Struct("!4sBBHIIQQ")
DIGEST = struct.Struct("!Q")
MOST_META_BYTES = 64 * 2**10
MOST_META_DEPTH = 8
MOST_DOCUMENT_BYTES = 64 * 2**20  # manifests and the like
LEAST_BLOCK_BYTES, MOST_BLOCK_BYTES = 2**16, 8 * 2**20
MOST_PUT = 16  # chunks of one frame
NONCE_BYTES = 32
VERSION = handshake.VERSION


class Kind(IntEnum):
    # the node sends first
    HELLO = 1  # node: {"version", "block_bytes", "nonce", "token": bool}
    AUTH = 2  # client: {"version", "nonce", "address", "proof"}; the proof is empty if the node has no token
    # answers
    OK = 10
    ERROR = 11  # {"code", "message"}
    DATA = 12  # a body that was asked for
    # of a run; OPEN must be first
    OPEN = 20  # {"run", "session", "write": bool, "proof" or "verifier"}
    BEGIN = 21  # {"step", "size_bytes", "layout", "rank", "world_size"} and, if nodes share the chunks,
    # {"nodes", "node_index", "replicas"}: then room is reserved for this node's share only; {"attempt"}: a higher one
    # of the same step begins anew; {"repair": true}: only while no save is under way
    KEEP = 23  # {"step", "from_step"} + body: N chunk indices u32, then N digests u64, of what is as it was
    EXTRA = 24  # {"step", "rank"} + body: this rank's own state, a JSON document
    EXTRAS = 25  # {"step", "world_size", "timeout_s"} -> DATA: JSON list of all ranks' documents
    SEAL = 26  # {"step", "timeout_s"} + body: chunk indices u32 that the node must have -> DATA: their digests u64
    PUBLISH = 27  # {"step"} and, if nodes share the chunks, {"node_index"} + body: the manifest
    ABORT = 28  # {"step"} and {"attempt"}: later attempts continue
    STEPS = (
        30  # {} or {"after", "timeout_s"} -> OK {"steps": [{"step", "size_bytes", "state"}], "writes_on", "version"}
    )
    MANIFEST = 31  # {"step"} -> DATA
    GET = 32  # {"step", "chunk"} -> DATA
    DELETE = 33  # {"step"}
    MEND = 34  # {"step", "chunk"} + body: the chunk as its manifest lists it, in place of a damaged one
    OFFER = 35  # {"step"} + body: N chunk indices u32, then N digests u64 -> DATA: indices u32 that the node may have
    LINK = 36  # {"step"} + body: N indices u32, digests u64 and proofs of 32 bytes -> DATA: indices u32 that it shares
    PUTS = 37  # {"step", "chunks": [indices]} + body: each chunk, followed by its digest u64
    # of the node
    RUNS = 40  # -> OK {"runs": [...], "more": how many were left out}
    STATUS = 41  # -> OK {...}


DOCUMENTS = frozenset({Kind.KEEP, Kind.EXTRA, Kind.SEAL, Kind.PUBLISH, Kind.DATA, Kind.OFFER, Kind.LINK})
_MOST_BODY_BYTES = {  # of all other kinds: none
    **dict.fromkeys(DOCUMENTS, MOST_DOCUMENT_BYTES),
    Kind.MEND: MOST_BLOCK_BYTES,
    Kind.PUTS: MOST_PUT * (MOST_BLOCK_BYTES + DIGEST.size),
}


_KINDS = frozenset(int(kind) for kind in Kind)


class ProtocolError(StoreError):
    """Bytes that are not a valid frame. The connection cannot be used any more."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame's header."""

    kind: Kind
    request: int
    meta_bytes: int
    body_bytes: int
    digest: int


def encode(
    kind: Kind, request: int = 0, meta: Mapping[str, Any] | None = None, body_bytes: int = 0, digest: int = 0
) -> bytes:
    """Encode header and meta of a frame; the body follows them on the wire."""
    text = json.dumps(meta, separators=(",", ":"), allow_nan=False).encode() if meta else b""
    if len(text) > MOST_META_BYTES:
        raise ProtocolError(f"meta of {len(text)} bytes, the limit is {MOST_META_BYTES}")
    return HEADER.pack(MAGIC, kind, 0, 0, request & 0xFFFFFFFF, len(text), body_bytes, digest) + text


def decode_header(data: bytes | bytearray | memoryview) -> Frame:
    """Check a header, before anything that it announces is read."""
    try:
        magic, kind, flags, reserved, request, meta_bytes, body_bytes, digest = HEADER.unpack(data)
    except struct.error:
        raise ProtocolError("a frame's header is cut off") from None
    if magic != MAGIC:
        raise ProtocolError("not the protocol of a deepvm memory node, or of another version")
    if kind not in _KINDS or flags or reserved:
        raise ProtocolError(f"unknown kind {kind} or flags {flags}")
    if meta_bytes > MOST_META_BYTES:
        raise ProtocolError(f"meta of {meta_bytes} bytes, the limit is {MOST_META_BYTES}")
    found = Kind(kind)
    most = _MOST_BODY_BYTES.get(found, 0)
    if body_bytes > most:
        raise ProtocolError(f"{found.name} with a body of {body_bytes} bytes, the limit is {most}")
    return Frame(found, request, meta_bytes, body_bytes, digest)


def decode_meta(data: bytes | bytearray | memoryview) -> dict[str, Any]:
    if not data:
        return {}
    try:
        found = strict.loads(data, most_bytes=MOST_META_BYTES, most_depth=MOST_META_DEPTH, small_integers=True)
        return strict.table(found, "it")
    except strict.MalformedJson as error:
        raise ProtocolError(f"a frame's meta cannot be read: {error}") from None


# --- receiving, at either end of a connection ---------------------------------------------------------------------


def receive_head(receive: Callable[[memoryview], None], tags: handshake.Tags) -> tuple[Frame, dict[str, Any], bytes]:
    """Receive and check a frame's header and meta; also return them as they were sent. The body is the caller's."""
    start = bytearray(HEADER.size + tags.size)
    receive(memoryview(start))
    header, tag = start[: HEADER.size], start[HEADER.size :]
    frame = decode_header(header)
    meta = bytearray(frame.meta_bytes)
    if meta:
        receive(memoryview(meta))
    head = bytes(header + meta)
    check_tag(tags.fits(head, tag))
    return frame, decode_meta(meta), head


def is_intact(frame: Frame, body: bytearray, tag: bytearray | memoryview, tags: handshake.Tags) -> bool:
    """True if a document has the digest of its frame; then its tag is checked, too."""
    if xxhash.xxh3_64_intdigest(body) != frame.digest:
        tags.skip(1)
        return False
    check_tag(tags.fits_document(body, tag))
    return True


def check_tag(fits: bool) -> None:
    if not fits:
        raise ProtocolError("a frame's tag is wrong: it was changed, repeated or left out on the way")


# --- numbers: little-endian, "I" has 4 bytes, "Q" has 8 -------------------------------------------------------------


def pack(code: str, numbers: Iterable[int]) -> bytes:
    packed = array(code, numbers)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack(code: str, data: bytes | bytearray) -> array[int]:
    numbers = array(code)
    if len(data) % numbers.itemsize:
        raise ProtocolError(f"{len(data)} bytes, which is not a multiple of {numbers.itemsize}")
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


# --- errors over the wire -----------------------------------------------------------------------------------------

_ERRORS: dict[str, type[StoreError]] = {
    "denied": AccessDenied,
    "fenced": AccessDenied,
    "not-found": NotFound,
    "corrupt": Corrupt,
    "no-room": StoreUnavailable,
    "busy": StoreUnavailable,
    "stopping": StoreUnavailable,
    "malformed": ProtocolError,
    "failed": StoreError,
}


def error_meta(code: str, message: str) -> dict[str, str]:
    assert code in _ERRORS  # noqa: S101 - our own words
    return {"code": code, "message": message[:1000]}


def raise_error(meta: Mapping[str, Any]) -> None:
    code, message = meta.get("code"), meta.get("message")
    if not isinstance(message, str) or not message.strip():
        message = f"refused without a reason ({strict.brief(code)})"
    shown = "".join(c if c.isprintable() else "?" for c in message[:1000])  # it may reach a terminal
    raise _ERRORS.get(str(code), StoreError)(shown)


# --- proofs: neither the token nor a run's key ever crosses the wire ----------------------------------------------


def new_nonce() -> str:
    return secrets.token_hex(NONCE_BYTES)


def proof(secret: str, role: str, node_nonce: str, client_nonce: str) -> str:
    """Prove that the client knows a run's key, for this connection only."""
    text = f"deepvm/{VERSION}/{role}/{node_nonce}/{client_nonce}"
    return hmac.digest(secret.encode(), text.encode(), "sha256").hex()


def same(left: str, right: str) -> bool:
    return hmac.compare_digest(left.encode("utf-8", "surrogatepass"), right.encode("utf-8", "surrogatepass"))


def run_verifier(run: str, key: str) -> str:
    """Derive what a node stores of a run's key, also on disk: it verifies the key and does not reveal it."""
    return hmac.digest(key.encode(), f"deepvm-run/1/{run}".encode(), "sha256").hex()


def masked(verifier: str, token: str | None, node_nonce: str, client_nonce: str) -> str:
    """Hide the verifier of a new run on its way to the node; only the token reveals it. The same call unmasks it.

    Without a token the node listens on loopback only, and nothing is hidden."""
    if token is None:
        return verifier
    pad = bytes.fromhex(proof(token, "mask", node_nonce, client_nonce))
    return bytes(a ^ b for a, b in zip(bytes.fromhex(verifier), pad, strict=True)).hex()


def content_key(node_nonce: str, client_nonce: str) -> bytes:
    """Return the key of content proofs on one connection: on another connection they are not valid."""
    return hashlib.sha256(f"deepvm/{VERSION}/content/{node_nonce}/{client_nonce}".encode()).digest()


def content_proof(key: bytes, pieces: Iterable[memoryview]) -> bytes:
    """Prove that one side has these very bytes. Their digests prove nothing: xxh3 is not a cryptographic hash."""
    hasher = hashlib.sha256(key)  # with the processor's help faster than blake2b; both let other threads run
    for piece in pieces:
        hasher.update(piece)
    return hasher.digest()


def fingerprint(text: str) -> str:
    """Return a short name for a secret or a layout, for logs."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]
