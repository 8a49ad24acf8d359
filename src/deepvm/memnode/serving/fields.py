"""Check the meta of frames by type and range. Wrong values raise ProtocolError or MalformedJson (see connection.py)."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from deepvm import strict_json as strict
from deepvm.errors import UsageError
from deepvm.memnode.storage.upload import Begin
from deepvm.protocol import frames
from deepvm.protocol.placement import Share
from deepvm.store.base import MOST_CHUNKS, MOST_NODES, MOST_STEP, MOST_WORLD_SIZE, check_run

MOST_TIMEOUT_S = 3600.0
_HEX_DIGITS = 64  # of 32 bytes: nonces, proofs and verifiers alike

Meta = Mapping[str, Any]


def integer(meta: Meta, name: str, least: int, most: int, default: int | None = None) -> int:
    return strict.integer(meta.get(name, default), name, least, most)


def text(meta: Meta, name: str, most: int, *, least: int = 1) -> str:
    return strict.text(meta.get(name), name, most, least=least)


def flag(meta: Meta, name: str) -> bool:
    return strict.flag(meta.get(name, False), name)


def hexadecimal(meta: Meta, name: str) -> str:
    value = meta.get(name)
    if not isinstance(value, str) or len(value) != _HEX_DIGITS or set(value) - set("0123456789abcdef"):
        raise frames.ProtocolError(f"{name} is not {_HEX_DIGITS} hexadecimal digits")
    return value


def optional_hexadecimal(meta: Meta, name: str) -> str | None:
    return None if meta.get(name) in (None, "") else hexadecimal(meta, name)


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
    found = strict.array(meta.get("chunks"), "chunks", frames.MOST_PUT)
    if not found:
        raise frames.ProtocolError("chunks is an empty list")
    return [chunk({"chunk": one}) for one in found]


def timeout_s(meta: Meta, *, most_s: float = MOST_TIMEOUT_S) -> float:
    return min(strict.number(meta.get("timeout_s", 0), "timeout_s", 0, sys.float_info.max), most_s)


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
        partial_reservation=flag(meta, "lean"),
    )
