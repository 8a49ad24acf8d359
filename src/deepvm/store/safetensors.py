"""Parse the header of a safetensors file: untrusted bytes in, checked tensor entries out."""

from __future__ import annotations

from operator import itemgetter
from typing import Any, NamedTuple

from deepvm import strict_json as strict
from deepvm.errors import Corrupt
from deepvm.store.base import Manifest, Store

MOST_HEADER_BYTES = 100_000_000  # the format's own limit
MOST_HEADER_VALUES = 8_000_000  # about 1 million tensors
MOST_DIMENSIONS = 64
_MOST_BYTES = 2**62  # of a file, and entries in one dimension
_DEPTH = 3  # the file, its tensors, their shapes
_LENGTH_BYTES = 8
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


class TensorEntry(NamedTuple):
    offset: int  # in the file
    size_bytes: int
    name: str
    dtype: str
    shape: tuple[int, ...]


class Header(NamedTuple):
    tensors: list[TensorEntry]  # in the order of their offsets
    metadata: dict[str, str]


def header_bytes(start: bytes | memoryview, size_bytes: int) -> int:
    """Return how many bytes length and header take, from a file's first eight."""
    if size_bytes < _LENGTH_BYTES or len(start) < _LENGTH_BYTES:
        raise Corrupt(f"{size_bytes} bytes are too few for a safetensors file")
    length = int.from_bytes(start[:_LENGTH_BYTES], "little")
    if length > min(MOST_HEADER_BYTES, size_bytes - _LENGTH_BYTES):
        raise Corrupt(f"the safetensors header claims {length} bytes in a file of {size_bytes}")
    return _LENGTH_BYTES + length


def parse_header(start: bytes | memoryview, size_bytes: int) -> Header:
    """Parse a header: the only parser. Raise Corrupt unless it is JSON of exactly the format's form, tensors
    fill the rest of the file without gaps, and each is as large as its shape."""
    end = header_bytes(start, size_bytes)
    if len(start) < end:
        raise Corrupt(f"the safetensors header has {end} bytes, {len(start)} are there")
    try:
        text = bytes(start[_LENGTH_BYTES:end]).rstrip(b" ")  # json would take 3 ms for a MiB of padding
        found = strict.loads(text, most_bytes=MOST_HEADER_BYTES, most_depth=_DEPTH, most_values=MOST_HEADER_VALUES)
        document = strict.table(found, "the safetensors header")
        metadata = strict.table(document.pop("__metadata__", {}), "__metadata__")
        for name, value in metadata.items():
            if type(value) is not str:
                raise strict.MalformedJson(f"__metadata__ {strict.brief(name)} is {strict.brief(value)}, not text")
        tensors = [_entry(name, fields, end) for name, fields in document.items()]
    except strict.MalformedJson as error:
        raise Corrupt(f"the safetensors header cannot be read: {error}") from None
    tensors.sort(key=itemgetter(0, 1))
    position = end
    for offset, length, name, _, _ in tensors:
        if offset != position:
            shown = strict.brief(name)
            raise Corrupt(f"tensor {shown} begins at byte {offset}, the one before ends at {position}")
        position += length
    if position != size_bytes:
        raise Corrupt(f"the tensors end at byte {position} of a file of {size_bytes}")
    return Header(tensors, metadata)


def _entry(name: str, fields: Any, start: int) -> TensorEntry:
    try:
        dtype, shape, (begin, end) = fields["dtype"], fields["shape"], fields["data_offsets"]
        if type(dtype) is not str or type(shape) is not list or len(shape) > MOST_DIMENSIONS:
            raise ValueError
        elements = extent = 1  # torch multiplies the sizes that are not 0, too
        for n in shape:
            if type(n) is not int or not 0 <= n <= _MOST_BYTES:
                raise ValueError
            elements *= n
            extent *= n or 1
        if extent > _MOST_BYTES:
            raise ValueError
        if type(begin) is not int or type(end) is not int or not 0 <= begin <= end <= _MOST_BYTES:
            raise ValueError
    except (LookupError, TypeError, ValueError):
        raise strict.MalformedJson(f"tensor {strict.brief(name)} is {strict.brief(fields)}") from None
    bits = _BITS.get(dtype)
    if bits is not None and elements * bits != 8 * (end - begin):
        shown = f"{strict.brief(name)} is {dtype} {strict.brief(shape)}"
        raise strict.MalformedJson(f"tensor {shown}, but takes {end - begin} bytes")
    if bits is None:
        strict.text(dtype, f"the type of tensor {strict.brief(name)}", 32, least=1)
    return TensorEntry(start + begin, end - begin, name, dtype, tuple(shape))


def read_header(store: Store, manifest: Manifest) -> Header:
    """Read the header of a checkpoint in any store; only the chunks that hold it are read."""
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
