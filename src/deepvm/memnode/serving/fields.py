"""The meta of frames, checked by type and range: a bool is no int, a float no step. What does not fit is malformed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from deepvm.errors import UsageError
from deepvm.memnode.storage.upload import Begin
from deepvm.protocol import frames
from deepvm.protocol.placement import Share
from deepvm.store.base import MOST_CHUNKS, check_run

MOST_STEP = 2**63 - 1
MOST_WORLD_SIZE = 2**20
MOST_NODES = 4096
MOST_TIMEOUT_S = 3600.0
_HEX_DIGITS = 64  # of 32 bytes: nonces, proofs and verifiers alike

Meta = Mapping[str, Any]


def integer(meta: Meta, name: str, least: int, most: int, default: int | None = None) -> int:
    value = meta.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise frames.ProtocolError(f"{name!r} must be an integer from {least} to {most}")
    return value


def text(meta: Meta, name: str, most: int, *, least: int = 1) -> str:
    value = meta.get(name)
    if not isinstance(value, str) or not least <= len(value) <= most or not value.isprintable():
        raise frames.ProtocolError(f"{name!r} must be printable text of at most {most} characters")
    return value


def flag(meta: Meta, name: str) -> bool:
    value = meta.get(name, False)
    if not isinstance(value, bool):
        raise frames.ProtocolError(f"{name!r} must be true or false")
    return value


def hexadecimal(meta: Meta, name: str, *, required: bool = True) -> str | None:
    value = meta.get(name)
    if value is None or value == "":
        if required:
            raise frames.ProtocolError(f"{name!r} is missing")
        return None
    if not isinstance(value, str) or len(value) != _HEX_DIGITS or set(value) - set("0123456789abcdef"):
        raise frames.ProtocolError(f"{name!r} must be {_HEX_DIGITS} hexadecimal digits")
    return value


def run_name(meta: Meta) -> str:
    try:
        return check_run(text(meta, "run", 100))
    except UsageError as error:
        raise frames.ProtocolError(str(error)) from None


def step(meta: Meta, name: str = "step") -> int:
    return integer(meta, name, 0, MOST_STEP)


def chunk(meta: Meta) -> int:
    return integer(meta, "chunk", 0, MOST_CHUNKS - 1)


def chunks(meta: Meta) -> list[int]:
    found = meta.get("chunks")
    if not isinstance(found, list) or not 1 <= len(found) <= frames.MOST_PUT:
        raise frames.ProtocolError(f"'chunks' must be a list of 1 to {frames.MOST_PUT} chunks")
    return [chunk({"chunk": one}) for one in found]


def timeout_s(meta: Meta) -> float:
    value = meta.get("timeout_s", 0)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise frames.ProtocolError("'timeout_s' must be a number of seconds")
    return min(float(value), MOST_TIMEOUT_S)


def begin(meta: Meta, block_bytes: int) -> Begin:
    world_size = integer(meta, "world_size", 1, MOST_WORLD_SIZE)
    nodes = integer(meta, "nodes", 1, MOST_NODES, 1)
    return Begin(
        step=step(meta),
        size_bytes=integer(meta, "size_bytes", 1, MOST_CHUNKS * block_bytes),
        layout=text(meta, "layout", 1024, least=0),
        rank=integer(meta, "rank", 0, world_size - 1),
        world_size=world_size,
        share=Share(
            nodes=nodes,
            index=integer(meta, "node_index", 0, nodes - 1, 0),
            replicas=integer(meta, "replicas", 1, nodes, 1),
        ),
        attempt=integer(meta, "attempt", 0, MOST_STEP, 0),
        repair=flag(meta, "repair"),
        lean=flag(meta, "lean"),
    )
