"""Where every byte of a checkpoint lies: alignment, order, names in any script, and types that the format lacks."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
import torch

from deepvm.checkpoint.state.layout import (
    ALIGNED_BYTES,
    LARGE_HEADER_BYTES,
    LARGE_STATE_BYTES,
    Layout,
    dtype_named,
    from_storable,
    header_size,
    make_layout,
    read_header,
    to_storable,
)
from deepvm.checkpoint.state.tensor_kinds import fill_expanded, is_expanded, laid_out, own_stride, usual_stride
from deepvm.errors import CheckpointError, Corrupt

SPECS = [
    ("odd8", "U8", (3,)),
    ("late", "F32", (16,)),
    ("odd64", "F64", (3,)),
    ("early", "F32", (2, 16)),
    ("none", "F32", (0, 5)),
    ("scalar", "I64", ()),
    ("odd32", "F32", (5,)),
]


def layout_of(stability: tuple[int, ...] = ()) -> Layout:
    return make_layout(SPECS, {"a": "b"}, 0, stability)  # type: ignore[arg-type]


def test_tensors_lie_without_gaps_aligned_ones_first_and_odd_ones_by_width() -> None:
    layout = layout_of()
    assert [e.name for e in layout.entries] == ["late", "early", "none", "odd64", "scalar", "odd32", "odd8"]
    at = layout.header_bytes
    for entry in layout.entries:
        assert entry.start == at
        at += entry.bytes
    assert at == layout.size_bytes
    assert [e.bytes for e in layout.entries] == [64, 128, 0, 24, 8, 20, 3]
    assert all(e.start % ALIGNED_BYTES == 0 for e in layout.entries[:3])


def test_what_changes_least_comes_first_but_odd_sizes_stay_last() -> None:
    layout = layout_of((0, 2, 1, 1, 0, 0, 5))
    assert [e.name for e in layout.entries] == ["none", "early", "late", "scalar", "odd64", "odd32", "odd8"]


def test_entries_that_overlap_a_range_are_found() -> None:
    layout = layout_of()
    start = layout.header_bytes
    names = [e.name for e in layout.entries]

    def found(a: int, b: int) -> list[str]:
        return [names[i] for i in layout.overlapping(start + a, start + b)]

    assert found(0, 64) == ["late"]
    assert found(63, 65)[:2] == ["late", "early"]
    assert found(64, 65) == ["early"]
    assert found(192, 193)[-1] == "odd64"
    assert found(246, 247) == ["odd8"]
    assert [names[i] for i in layout.overlapping(0, start + 1)] == ["late"]


def test_a_layout_knows_its_own_tensors_in_any_order_and_no_others() -> None:
    layout = layout_of()
    assert layout.holds(SPECS[::-1])
    assert not layout.holds(SPECS[1:])
    assert not layout.holds([*SPECS[1:], ("odd8", "I8", (3,))])
    assert layout.fingerprint == layout_of().fingerprint
    assert layout.fingerprint != layout_of((0, 2, 1, 1, 0, 0, 5)).fingerprint
    assert [layout.by_name[e.name] for e in layout.entries] == list(range(7))


def test_names_and_metadata_of_any_script_are_kept_as_they_are() -> None:
    layout = make_layout([("gewicht.ü", "F32", (1,))], {"läufer": "ß"}, 0)
    header = layout.header({"läufer": "ß"})
    assert header is not None
    assert "gewicht.ü".encode() in header
    assert '"läufer":"ß"'.encode() in header
    assert len(header) == layout.header_bytes
    found, metadata = read_header(header, layout.size_bytes)
    assert (found, metadata) == (layout, {"läufer": "ß"})


def test_a_file_without_tensors_has_only_metadata() -> None:
    layout = make_layout([], {"a": "b"}, 0)
    header = layout.header({"a": "b"})
    assert header is not None
    assert json.loads(header[8:]) == {"__metadata__": {"a": "b"}}
    assert layout.size_bytes == layout.header_bytes == 4096


def test_metadata_that_has_outgrown_its_room_has_no_header() -> None:
    layout = make_layout([("a", "F32", (1,))], {"x": ""}, 0)
    room = layout.header_bytes - len((layout.header({"x": ""}) or b"").rstrip())
    assert layout.header({"x": "y" * room}) is not None
    assert layout.header({"x": "y" * (room + 1)}) is None


@pytest.mark.parametrize(
    ("needed", "data_bytes", "found"),
    [
        (1, 0, 4096),
        (4097, 0, 8192),
        (4097, LARGE_STATE_BYTES - 1, 8192),
        (1, LARGE_STATE_BYTES, LARGE_HEADER_BYTES),
        (LARGE_HEADER_BYTES + 1, LARGE_STATE_BYTES, 2 * LARGE_HEADER_BYTES),
        (9 * 2**20, 0, 12 * 2**20),
    ],
)
def test_headers_have_one_of_few_sizes(needed: int, data_bytes: int, found: int) -> None:
    assert header_size(needed, data_bytes) == found


def test_more_names_than_the_format_holds_are_refused() -> None:
    with pytest.raises(CheckpointError, match="the state's names and plain values need 100663296 bytes"):
        make_layout([], {"a": "b"}, 100_000_000)


def test_a_type_of_another_version_is_corrupt() -> None:
    text = json.dumps({"a": {"dtype": "F8_E8M0", "shape": [1], "data_offsets": [0, 1]}}).encode()
    with pytest.raises(Corrupt, match="tensors of type F8_E8M0 are not known to this version"):
        read_header(len(text).to_bytes(8, "little") + text, 8 + len(text) + 1)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.float8_e4m3fnuz])
def test_types_that_the_format_lacks_are_stored_as_their_bytes(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).to(torch.float32).to(dtype).reshape(2, 3)
    plain, real = to_storable(tensor)
    assert real == str(dtype).removeprefix("torch.")
    back = from_storable(plain, real)
    assert (back.dtype, back.shape) == (dtype, tensor.shape)
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))
    assert to_storable(torch.ones(2))[1] is None


def test_negated_and_conjugated_views_are_stored_as_what_they_say() -> None:
    values = torch.tensor([1 + 2j, 3 - 4j])
    assert from_storable(*to_storable(values.conj())).tolist() == [1 - 2j, 3 + 4j]  # type: ignore[arg-type]
    negated = torch._neg_view(torch.ones(2))
    assert to_storable(negated)[0].tolist() == [-1.0, -1.0]


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


def in_rows() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.eye(3).to_sparse_csr()


@pytest.mark.parametrize(
    "make", [quantized, in_rows, lambda: torch.eye(2).to_sparse(), lambda: torch.empty(2, dtype=torch.bits16)]
)
def test_layouts_and_types_without_plain_bytes_are_refused(make: Any) -> None:
    with pytest.raises(CheckpointError, match="cannot be saved"):
        to_storable(make())


@pytest.mark.parametrize("name", ["nn", "Tensor", "float32 ", "", 5, None, "__name__", "float99"])
def test_a_name_that_is_no_type_of_tensors_is_corrupt(name: object) -> None:
    with pytest.raises(Corrupt, match="is not a type of tensors in torch"):
        dtype_named(name)


def test_a_type_is_found_by_its_name() -> None:
    assert dtype_named("bfloat16") is torch.bfloat16


# --- strides ---------------------------------------------------------------------------------------------------------


def test_own_strides_are_told_only_where_they_are_not_the_usual_ones() -> None:
    rows = torch.ones(2, 3)
    assert own_stride(rows) is None
    assert own_stride(rows.t()) == (1, 3)
    assert own_stride(torch.ones(6)[::2]) is None  # without the gaps
    assert own_stride(torch.ones(0, 3).t()) is None
    assert own_stride(torch.ones(1, 1)) is None
    image = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert own_stride(image) == (48, 1, 12, 3)
    single = torch.ones(2, 1, 4, 4).to(memory_format=torch.channels_last)
    assert own_stride(single) == (16, 1, 4, 1)
    assert usual_stride((2, 3, 4)) == (12, 4, 1)


@pytest.mark.parametrize("stride", [[1, 2], (1, 2), [3, 1]])
def test_a_tensor_is_laid_out_with_dense_strides(stride: Any) -> None:
    tensor = torch.arange(6).reshape(2, 3)
    found = laid_out(tensor, stride)
    assert (found.stride(), found.tolist()) == (tuple(stride), tensor.tolist())
    assert (found is tensor) == (tuple(stride) == (3, 1))
    assert laid_out(torch.ones(1, 3), [99, 1]).tolist() == [[1.0] * 3]


@pytest.mark.parametrize("stride", [None, "ab", [1], [1, 2, 3], [2, 2], [6, 2], [0, 1], [-1, 2], [1.0, 2], [2**62, 1]])
def test_strides_that_cannot_be_are_corrupt(stride: Any) -> None:
    with pytest.raises(Corrupt, match=r"a saved tensor of shape \(2, 3\) cannot have the strides"):
        laid_out(torch.ones(2, 3), stride)


def test_expanded_tensors_are_known_and_filled_once() -> None:
    base = torch.zeros(1, 3)
    expanded = base.expand(4, 3)
    assert is_expanded(expanded)
    for other in (torch.ones(3), torch.ones(1, 3).expand(1, 3), 5, torch.eye(2).to_sparse()):
        assert not is_expanded(other)
    fill_expanded(expanded, torch.tensor([[1.0, 2.0, 3.0]]).expand(4, 3).clone())
    assert base.tolist() == [[1.0, 2.0, 3.0]]
    assert expanded.stride() == (0, 1)
    fill_expanded(expanded, torch.arange(12.0).reshape(4, 3))
    assert expanded.tolist() == torch.arange(12.0).reshape(4, 3).tolist()
    assert base.tolist() == [[1.0, 2.0, 3.0]]
