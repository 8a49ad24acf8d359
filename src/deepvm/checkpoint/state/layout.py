"""The place of every byte of a checkpoint: a safetensors file, planned before any byte moves.

    u64 header length · header (JSON, padded with spaces) · tensors, without gaps: frozen ones first, odd sizes last

The header has one of few sizes and room to grow, so that neither a save with a longer skeleton nor another run from
the same base model moves a tensor: a chunk that moved would count as changed.
"""

from __future__ import annotations

import bisect
import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
import xxhash

from deepvm import strict_json as strict
from deepvm.errors import CheckpointError, Corrupt
from deepvm.store.safetensors import MOST_HEADER_BYTES, header_bytes, parse_header
from deepvm.store.state_check import is_dtype_name

PAGE_BYTES = 4096
ALIGNED_BYTES = 64  # as torch's own memory is; the last bits of a matrix product may depend on it
LARGE_STATE_BYTES, LARGE_HEADER_BYTES = 256 * 2**20, 2**20  # 0.4 % at most, for which most headers are of one size
HEADER_STEP_BYTES = 4 * 2**20
METADATA = "__metadata__"  # in the place of a tensor's name: the format's own

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
DTYPES = {name: dtype for dtype, name in _NAMES.items()}
# Types that the format lacks, as floats that have the same bytes
_AS_REAL = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor in the file. ``start`` counts from the beginning of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    bytes: int


def to_storable(tensor: torch.Tensor) -> tuple[torch.Tensor, str | None]:
    """Return a tensor of a type that the format has, with the same bytes; and its real type, if that is different."""
    if tensor.is_quantized or tensor.layout is not torch.strided:
        raise CheckpointError(f"a tensor of layout {tensor.layout} cannot be saved: make it dense first")
    if tensor.dtype in _NAMES:
        return tensor.resolve_neg(), None
    real = str(tensor.dtype).removeprefix("torch.")
    if tensor.dtype in _AS_REAL:
        return torch.view_as_real(tensor.resolve_conj().resolve_neg()), real
    if tensor.element_size() == 1 and _is_copied(tensor.dtype):
        return tensor.view(torch.uint8), real
    raise CheckpointError(f"a tensor of type {tensor.dtype} cannot be saved: save its view as torch.uint8")


@cache
def _is_copied(dtype: torch.dtype) -> bool:
    """True if torch copies tensors of a type: it does not those of uint4, which could never be restored."""
    try:
        torch.empty(1, dtype=dtype).copy_(torch.empty(1, dtype=dtype))
    except (RuntimeError, TypeError):  # NotImplementedError is one
        return False
    return True


def dtype_named(name: object) -> torch.dtype:
    """Return torch's type of this name, from a file. Raise Corrupt if torch has something else of that name."""
    dtype = getattr(torch, str(name), None) if is_dtype_name(name) else None
    if not isinstance(dtype, torch.dtype):
        raise Corrupt(f"{strict.brief(name)} is not a type of tensors in torch {torch.__version__}")
    return dtype


def from_storable(tensor: torch.Tensor, real: str) -> torch.Tensor:
    dtype = dtype_named(real)
    return torch.view_as_complex(tensor) if dtype in _AS_REAL else tensor.view(dtype)


Spec = tuple[str, str, tuple[int, ...]]  # name, type, shape


@dataclass(frozen=True)
class Layout:
    """The file's plan. Two ranks with the same tensors make the same one."""

    entries: tuple[Entry, ...]  # by their place in the file
    header_bytes: int  # with its length field: where the first tensor begins
    size_bytes: int

    @cached_property
    def fingerprint(self) -> str:
        text = json.dumps([self.header_bytes, [[e.name, e.dtype, e.shape, e.start] for e in self.entries]])
        return xxhash.xxh3_64_hexdigest(text.encode())

    @cached_property
    def by_name(self) -> dict[str, int]:
        return {e.name: i for i, e in enumerate(self.entries)}

    @cached_property
    def _starts(self) -> list[int]:
        return [e.start for e in self.entries]

    @cached_property
    def _entries_text(self) -> bytes:
        return entries_text(self.entries, self.header_bytes)

    def overlapping(self, start: int, end: int) -> range:
        """Return the entries that have bytes in [start, end)."""
        first = max(0, bisect.bisect_right(self._starts, start) - 1)
        return range(first, bisect.bisect_left(self._starts, end))

    def holds(self, specs: Sequence[Spec]) -> bool:
        """True if this is the layout of a state with these tensors."""
        return len(specs) == len(self.entries) and set(specs) == {(e.name, e.dtype, e.shape) for e in self.entries}

    def header(self, metadata: Mapping[str, str]) -> bytes | None:
        """Return the file's first bytes; None if the metadata has outgrown the planned room."""
        text = _with_metadata(self._entries_text, metadata)
        room = self.header_bytes - 8
        return None if len(text) > room else struct.pack("<Q", room) + text.ljust(room)


def spec_of(name: str, tensor: torch.Tensor) -> Spec:
    return name, _NAMES[tensor.dtype], tuple(tensor.shape)


def entries_text(entries: Sequence[Entry], data_start: int) -> bytes:
    rows = {
        e.name: {
            "dtype": e.dtype,
            "shape": list(e.shape),
            "data_offsets": [e.start - data_start, e.start - data_start + e.bytes],
        }
        for e in entries
    }
    return json.dumps(rows, separators=(",", ":"), ensure_ascii=False).encode()


def _with_metadata(rows: bytes, metadata: Mapping[str, str]) -> bytes:
    comma = b"," if len(rows) > 2 else b""
    described = json.dumps(dict(metadata), separators=(",", ":"), ensure_ascii=False).encode()
    return b'{"' + METADATA.encode() + b'":' + described + comma + rows[1:]


def make_layout(
    specs: Sequence[Spec], metadata: Mapping[str, str], slack_bytes: int, stability: Sequence[int] = ()
) -> Layout:
    """Lay out tensors in the order given, but first those that change least (of the lowest ``stability``): runs from
    one base model then have its bytes at the same places. Sizes that are not a multiple of 64 come last, wide types
    first, so that all others are aligned as torch's own memory is, and can be used where they lie."""
    widths = [DTYPES[dtype].itemsize for _, dtype, _ in specs]
    sizes = [widths[i] * math.prod(specs[i][2]) for i in range(len(specs))]

    def place(i: int) -> tuple[bool, int, int]:
        odd = sizes[i] % ALIGNED_BYTES != 0
        return odd, -widths[i] if odd else 0, stability[i] if stability else 0

    order = sorted(range(len(specs)), key=place)  # stable

    def placed(data_start: int) -> tuple[Entry, ...]:
        found, at = [], data_start
        for i in order:
            name, dtype, shape = specs[i]
            found.append(Entry(name, dtype, shape, at, sizes[i]))
            at += sizes[i]
        return tuple(found)

    text = len(_with_metadata(entries_text(placed(0), 0), metadata)) + slack_bytes
    header_bytes = header_size(8 + text, sum(sizes))
    if header_bytes > MOST_HEADER_BYTES:
        raise CheckpointError(f"the state's names and plain values need {header_bytes} bytes, the format holds 100 MB")
    return Layout(entries=placed(header_bytes), header_bytes=header_bytes, size_bytes=header_bytes + sum(sizes))


def header_size(needed: int, data_bytes: int) -> int:
    """Return a power of two that has room; a larger one for large states: one size for many runs."""
    least = LARGE_HEADER_BYTES if data_bytes >= LARGE_STATE_BYTES else PAGE_BYTES
    step = max(least, min(1 << (needed - 1).bit_length(), HEADER_STEP_BYTES))
    return -(-needed // step) * step


def read_header(head: bytes | memoryview, size_bytes: int) -> tuple[Layout, dict[str, str]]:
    """Parse a layout and its metadata from the first bytes of a file (at least 8 + header length of them)."""
    rows, metadata = parse_header(head, size_bytes)
    unknown = {dtype for _, _, _, dtype, _ in rows} - DTYPES.keys()
    if unknown:
        raise Corrupt(f"tensors of type {', '.join(sorted(unknown))} are not known to this version")
    entries = tuple(Entry(name, dtype, shape, start, length) for start, length, name, dtype, shape in rows)
    return Layout(entries=entries, header_bytes=header_bytes(head, size_bytes), size_bytes=size_bytes), metadata
