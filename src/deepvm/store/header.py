"""The header of a safetensors file: which tensors lie where. Read with suspicion, as it may come from anywhere."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepvm.errors import Corrupt
from deepvm.store.base import Manifest, Store

MOST_HEADER_BYTES = 100_000_000  # the format's own limit
_LENGTH_BYTES = 8
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int  # in the file
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    tensors: tuple[TensorEntry, ...]  # as they lie in the file
    metadata: Mapping[str, str]


def header_bytes(start: bytes | memoryview, size_bytes: int) -> int:
    """How many bytes length and header take, from a file's first eight."""
    if size_bytes < _LENGTH_BYTES or len(start) < _LENGTH_BYTES:
        raise Corrupt(f"{size_bytes} bytes are too few for a safetensors file")
    length = int.from_bytes(start[:_LENGTH_BYTES], "little")
    if length > min(MOST_HEADER_BYTES, size_bytes - _LENGTH_BYTES):
        raise Corrupt(f"the safetensors header claims {length} bytes in a file of {size_bytes}")
    return _LENGTH_BYTES + length


def parse_header(start: bytes | memoryview, size_bytes: int) -> Header:
    """Check a header whole: it is JSON, its tensors fill the rest of the file, each as large as its shape says."""
    end = header_bytes(start, size_bytes)
    try:
        document = json.loads(bytes(start[_LENGTH_BYTES:end]))
        metadata = document.pop("__metadata__", {})
        tensors = [_entry(name, fields, end) for name, fields in document.items()]
    except Corrupt:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Corrupt(f"the safetensors header cannot be read: {type(error).__name__} {error}") from None
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.size_bytes))
    position = end
    for tensor in tensors:
        if tensor.offset != position:
            raise Corrupt(f"tensor {tensor.name!r} begins at byte {tensor.offset}, the one before ends at {position}")
        position += tensor.size_bytes
    if position != size_bytes:
        raise Corrupt(f"the tensors end at byte {position} of a file of {size_bytes}")
    return Header(tensors=tuple(tensors), metadata=metadata)


def _entry(name: str, fields: dict[str, Any], start: int) -> TensorEntry:
    dtype, shape = fields["dtype"], tuple(fields["shape"])
    begin, end = fields["data_offsets"]
    if not all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end)) or end < begin:
        raise Corrupt(f"tensor {name!r} has shape {shape} at bytes {begin} to {end}")
    if dtype in _BITS and math.prod(shape) * _BITS[dtype] != 8 * (end - begin):
        raise Corrupt(f"tensor {name!r} is {dtype} {list(shape)}, but takes {end - begin} bytes")
    return TensorEntry(name=name, dtype=str(dtype), shape=shape, offset=start + begin, size_bytes=end - begin)


def read_header(store: Store, manifest: Manifest) -> Header:
    """The header of a checkpoint in any store; only the chunks that hold it are read."""
    first = _chunks(store, manifest, 0, 1)
    needed = header_bytes(first, manifest.size_bytes)
    further = -(-needed // manifest.chunk_bytes)
    return parse_header(first + _chunks(store, manifest, 1, further), manifest.size_bytes)


def _chunks(store: Store, manifest: Manifest, begin: int, end: int) -> bytes:
    data = bytearray()
    for chunk in range(begin, end):
        buffer = bytearray(manifest.span(chunk)[1])
        store.read_chunk(manifest, chunk, memoryview(buffer))
        data += buffer
    return bytes(data)
