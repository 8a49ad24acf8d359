"""State that is flattened and rebuilt is the state that it was."""

from __future__ import annotations

import json
import math
from collections import OrderedDict, namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from deepvm.checkpoint.state.layout import make_layout, read_header, spec_of
from deepvm.checkpoint.state.skeleton import Tensors, flatten, rebuild
from deepvm.errors import CheckpointError, Corrupt

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers() | st.booleans(), inner, max_size=4)
    ),
    max_leaves=20,
)


def there_and_back(value: object) -> object:
    tensors = Tensors()
    skeleton = json.loads(json.dumps(flatten(value, "x", tensors), allow_nan=False))
    return rebuild(skeleton, tensors)


def same(left: object, right: object) -> bool:
    if isinstance(left, float) and isinstance(right, float) and math.isnan(left):
        return math.isnan(right)
    if type(left) is not type(right):
        return False
    if isinstance(left, dict) and isinstance(right, dict):
        pairs = zip(left.items(), right.items(), strict=True)
        return len(left) == len(right) and all(same(k, q) and same(v, w) for (k, v), (q, w) in pairs)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    return bool(left == right)


@given(plain)
def test_plain_values_come_back_as_they_were(value: object) -> None:
    assert same(there_and_back(value), value)


def test_what_json_does_not_know_comes_back_too() -> None:
    point = namedtuple("point", "x y")
    value = {
        "set": {1, 2},
        "frozen": frozenset({"a"}),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "size": torch.Size([2, 3]),
        "complex": complex(1, float("inf")),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "scalar": np.float32(1.5),
        "$key": {"$tensor": "not a tensor"},
        "point": point(1, 2),
    }
    back = there_and_back(value)
    assert isinstance(back, dict)
    assert np.array_equal(back.pop("array"), value.pop("array"))
    assert back.pop("scalar") == np.float32(1.5)
    assert back.pop("point") == (1, 2)
    assert back.pop("size") == (2, 3)
    value.pop("point"), value.pop("size"), value.pop("scalar")
    assert back == value


def test_a_modules_versions_are_kept() -> None:
    state = torch.nn.BatchNorm1d(3).state_dict()
    back = there_and_back(state)
    assert isinstance(back, OrderedDict)
    assert back._metadata == state._metadata  # type: ignore[attr-defined]


def test_what_cannot_be_saved_is_named_with_its_place() -> None:
    with pytest.raises(CheckpointError, match=r"state 'x.loader' is a .*object"):
        flatten({"loader": object()}, "x", Tensors())
    with pytest.raises(CheckpointError, match="layout"):
        flatten(torch.eye(2).to_sparse(), "x", Tensors())


def test_tied_tensors_are_kept_once() -> None:
    layer = torch.nn.Linear(3, 3)
    tensors = Tensors()
    skeleton = flatten({"a": layer.weight, "b": layer.weight, "c": layer.weight.t()}, "m", tensors)
    assert skeleton["a"] == skeleton["b"] == {"$tensor": "m.a"}
    assert list(tensors) == ["m.a", "m.c"]


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64, torch.complex128, torch.float8_e4m3fnuz,
]  # fmt: skip


def test_every_dtype_and_shape_makes_a_file_that_safetensors_reads(tmp_path: Path) -> None:
    tensors = Tensors()
    values = {}
    for dtype in DTYPES:
        for shape in ((), (0,), (3,), (2, 0, 4), (5, 7)):
            raw = torch.randint(0, 2, (*shape, 16), dtype=torch.uint8)
            values[f"{dtype}{shape}"] = raw[..., : dtype.itemsize].contiguous().view(dtype).reshape(shape)
    skeleton = flatten(values, "all", tensors)
    specs = [spec_of(name, tensor) for name, tensor in tensors.items()]
    layout = make_layout(specs, {"skeleton": "x"}, 100)
    header = layout.header({"skeleton": "x"})
    assert header is not None
    content = bytearray(layout.size_bytes)
    content[: len(header)] = header
    for entry in layout.entries:
        tensor = tensors[entry.name].contiguous()
        content[entry.start : entry.start + entry.bytes] = bytes(tensor.reshape(-1).view(torch.uint8).tolist())
        assert entry.start % max(1, tensor.element_size()) == 0
    path = tmp_path / "all.safetensors"
    path.write_bytes(content)

    back, metadata = read_header(memoryview(content), len(content))
    assert back.entries == layout.entries
    assert metadata == {"skeleton": "x"}
    loaded = load_file(path)
    assert loaded.keys() == set(tensors)
    rebuilt = rebuild(skeleton, loaded)
    for name, value in values.items():
        assert rebuilt[name].dtype == value.dtype
        assert rebuilt[name].shape == value.shape
        assert (
            torch.equal(rebuilt[name].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8))
            or value.numel() == 0
        )


@given(st.binary(max_size=200))
def test_a_damaged_header_is_reported(data: bytes) -> None:
    with pytest.raises(Corrupt):
        read_header(memoryview(data.ljust(8, b"\0")), max(8, len(data)))


def test_a_header_that_puts_tensors_elsewhere_is_refused() -> None:
    text = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}).encode()
    with pytest.raises(Corrupt, match="begins at byte"):
        read_header(len(text).to_bytes(8, "little") + text, 8 + len(text) + 12)


@pytest.mark.parametrize(
    ("header_bytes", "next_bytes"), [(4096, 8192), (8192, 16384), (2**22, 2**23), (2**23, 3 * 2**22)]
)
def test_a_header_is_full_before_it_grows(header_bytes: int, next_bytes: int) -> None:
    spec = spec_of("a", torch.zeros(2))
    rest = len(bytes(make_layout([spec], {"x": ""}, 0).header({"x": ""}) or b"").rstrip())

    full = {"x": "a" * (header_bytes - rest)}
    layout = make_layout([spec], full, 0)
    assert layout.header_bytes == header_bytes
    assert len(bytes(layout.header(full) or b"").rstrip()) == header_bytes
    assert make_layout([spec], {"x": full["x"] + "a"}, 0).header_bytes == next_bytes
    assert make_layout([spec], full, 1).header_bytes == next_bytes
