"""Headers of safetensors files: read as the format's library reads them, and garbage is told as such."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepvm.errors import Corrupt
from deepvm.store.files.store import FileStore
from deepvm.store.safetensors import Header, parse_header, read_header
from tests.support.store.checkpoints import safetensors_payload, save


def document(header: dict[str, Any] | bytes, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def test_the_header_is_that_of_the_formats_own_library() -> None:
    from safetensors.torch import load

    data = safetensors_payload()
    header = parse_header(data, len(data))
    assert header.metadata == {"what": "a test"}
    tensors = load(data)
    assert {t.name for t in header.tensors} == set(tensors)
    for entry in header.tensors:
        tensor = tensors[entry.name]
        assert (entry.shape, entry.size_bytes) == (tuple(tensor.shape), tensor.numel() * tensor.element_size())


def test_a_header_longer_than_a_chunk_is_read(tmp_path: Any) -> None:
    tensors = {f"tensor-{k}": {"dtype": "U8", "shape": [1], "data_offsets": [k, k + 1]} for k in range(100)}
    store, data = FileStore(tmp_path), document(tensors, bytes(100))
    save(store, data, chunk_bytes=256)
    assert len(read_header(store, store.manifest("run-a", 1)).tensors) == 100


def test_a_tensor_may_take_as_many_bytes_as_any_file_can_have() -> None:
    for most, refused in ((2**62, False), (2**62 + 1, True)):
        start = document({"a": {"dtype": "U1024", "shape": [1], "data_offsets": [0, most]}})
        with pytest.raises(Corrupt) if refused else contextlib.nullcontext():
            assert parse_header(start, len(start) + most).tensors[0].size_bytes == most


U8 = {"dtype": "U8", "shape": [4]}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234567",
        (10**9).to_bytes(8, "little") + b"{}",
        (2**63).to_bytes(8, "little") + b"{}",
        document(b"no json"),
        document(b"[]"),
        document({"a": 1}),
        document({"a": {**U8}}),
        document({"a": {**U8, "data_offsets": [0, 4]}}, b"123"),
        document({"a": {**U8, "data_offsets": [0, 4]}}, b"12345"),
        document({"a": {**U8, "data_offsets": [4, 0]}}, b"1234"),
        document({"a": {**U8, "data_offsets": [-4, 0]}}, b"1234"),
        document({"a": {**U8, "data_offsets": [0, 8]}}, b"12345678"),
        document({"a": {**U8, "data_offsets": [0, 4]}, "b": {**U8, "data_offsets": [2, 6]}}, b"123456"),
        document({"a": {**U8, "data_offsets": [0, 4]}, "b": {**U8, "data_offsets": [6, 10]}}, b"1234567890"),
        document({"a": {"dtype": "U8", "shape": ["4"], "data_offsets": [0, 4]}}, b"1234"),
        document({"a": {"dtype": "U8", "shape": [4.0], "data_offsets": [0, 4]}}, b"1234"),
        document({"a": {"dtype": "U8", "shape": 4, "data_offsets": [0, 4]}}, b"1234"),
        document({"a": {"dtype": 8, "shape": [4], "data_offsets": [0, 4]}}, b"1234"),
        document({"a": {"dtype": "", "shape": [4], "data_offsets": [0, 4]}}, b"1234"),
        document({"a": {"dtype": "U8", "shape": [1] * 1000, "data_offsets": [0, 1]}}, b"1"),
        document({"a": {"dtype": "U8", "shape": [2**40, 2**40, 0], "data_offsets": [0, 0]}}),
        document({"a": {**U8, "data_offsets": [0, 4.0]}}, b"1234"),
        document({"a": {**U8, "data_offsets": [0]}}, b"1234"),
        document({"__metadata__": {"epoch": 3}, "a": {**U8, "data_offsets": [0, 4]}}, b"1234"),
        document({"__metadata__": [], "a": {**U8, "data_offsets": [0, 4]}}, b"1234"),
        document(b"[" * 100_000),
    ],
)
def test_garbage_is_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt):
        parse_header(data, len(data))


def test_a_header_of_which_only_the_beginning_is_there_is_corrupt() -> None:
    data = document({"a": {**U8, "data_offsets": [0, 4]}}, b"1234")
    for there in (8, 20):
        with pytest.raises(Corrupt):
            parse_header(data[:there], len(data))


@given(st.binary(max_size=200), st.integers(0, 2**40))
def test_no_bytes_at_all_raise_anything_else(data: bytes, size_bytes: int) -> None:
    for sample in (data, document(data)):
        with contextlib.suppress(Corrupt):
            assert isinstance(parse_header(sample, size_bytes), Header)
