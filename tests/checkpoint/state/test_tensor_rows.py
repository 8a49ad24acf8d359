"""Rows of a saved state that no good checkpoint has, or that only few states have, one function at a time."""

from __future__ import annotations

import enum
from typing import Any

import pytest
import torch

from deepvm.checkpoint.buffers.staging import Staging
from deepvm.checkpoint.restore.parameters import load_rest
from deepvm.checkpoint.restore.pending import _pending_among, attach, detach
from deepvm.checkpoint.restore.selection import _module_rows
from deepvm.checkpoint.restore.tensor_views import TensorViews
from deepvm.checkpoint.restore.validation import _check_tensor
from deepvm.checkpoint.snapshot.snapshot import stage
from deepvm.checkpoint.state.fill import fill_wrapper
from deepvm.checkpoint.state.layout import Layout, make_layout
from deepvm.checkpoint.state.optimizer_state import _laid_out
from deepvm.checkpoint.state.skeleton import _plain_of, module_tensors, rebuild
from deepvm.checkpoint.state.tensor_kinds import _has_memory, class_named
from deepvm.errors import CheckpointError, Corrupt


class Whole(int):
    pass


class Part(float):
    pass


class Text(str):
    __slots__ = ()


class Level(enum.IntEnum):
    HIGH = 3


class Pair(torch.Tensor):
    """A wrapper around two tensors, which may be wrappers."""

    @staticmethod
    def __new__(cls, left: torch.Tensor, right: torch.Tensor) -> Pair:
        return torch.Tensor._make_wrapper_subclass(cls, left.shape, dtype=left.dtype)

    def __init__(self, left: torch.Tensor, right: torch.Tensor) -> None:
        self.left, self.right = left, right

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["left", "right"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Pair:
        return cls(inner["left"], inner["right"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


def row(name: str) -> dict[str, Any]:
    return {"$tensor": name}


def pair_row(left: Any, right: Any) -> dict[str, Any]:
    shape = {"shape": [2], "stride": [1]}
    return {"$wrapper": f"{__name__}:Pair", "inner": {"left": left, "right": right}, "context": None, **shape}


def test_values_of_derived_classes_are_saved_as_the_plain_value() -> None:
    for value, plain in ((Whole(7), 7), (Part(0.5), 0.5), (Text("a"), "a"), (Level.HIGH, 3), (True, 1)):
        found = _plain_of(value)
        assert (type(found), found) == (type(plain), plain)


def test_a_wrapper_within_a_wrapper_is_filled_in_place() -> None:
    parts = [torch.zeros(2) for _ in range(3)]
    live = Pair(Pair(parts[0], parts[1]), parts[2])
    tensors = {name: torch.full((2,), float(number)) for number, name in enumerate("abc", start=1)}
    fill_wrapper(live, pair_row(pair_row(row("a"), row("b")), row("c")), tensors)
    assert [part.tolist() for part in parts] == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]


def test_a_wrapper_whose_parts_are_not_tensors_is_corrupt_and_one_of_an_unknown_class_names_the_import() -> None:
    tensors = {"a": torch.zeros(2)}
    with pytest.raises(Corrupt, match=r"a saved tensor of class .*Pair.* has parts that are not tensors"):
        rebuild(pair_row(row("a"), 5), tensors)
    for name in ("nowhere.to_be_found:Pair", f"{__name__}:Other", f"{__name__}:Whole", "torch:Tensor.shape"):
        module, _, qualname = name.partition(":")
        with pytest.raises(CheckpointError, match=f"of class {qualname}, which .* does not know: import {module} "):
            class_named(name)
    assert class_named(f"{Pair.__module__}:Pair") is Pair


def test_the_tensors_of_a_module_are_those_of_plain_rows() -> None:
    rows = {"w": row("x"), "v": {"$tensor": "y", "stride": [1, 2]}, "n": 5, "e": {"$items": []}}
    found = module_tensors({"$module": rows, "versions": {}})
    assert found.pop("w") == "x"
    assert not found.keys() - {"v"}
    for other in ({}, 5, None, {"$module": 5}, {"w": row("x")}):
        assert module_tensors(other) == {}


@pytest.mark.parametrize("versions", [{"": 5}, {"": {"version": "1"}}, {"a": {"version": 1}, "": {"version": 1.0}}])
def test_versions_of_parts_are_whole_numbers_or_none(versions: dict[str, Any]) -> None:
    with pytest.raises(Corrupt, match=r"the saved versions of m are .*, not one for each of its modules"):
        _module_rows("m", {"$module": {}, "versions": versions})
    good = {"": {"version": 1}, "a": {"version": None}, "b": {}}
    assert _module_rows("m", {"$module": {"w": row("x")}, "versions": good}) == ({"w": row("x")}, good)
    assert _module_rows("m", {"w": row("x")}) == ({"w": row("x")}, {})


def test_a_module_that_was_saved_without_versions_is_loaded_by_itself() -> None:
    module = torch.nn.Linear(2, 1)
    tensors = {"w": torch.tensor([[1.0, 2.0]]), "b": torch.tensor([3.0])}
    load_rest(module, module.state_dict(), {"weight": row("w"), "bias": row("b")}, tensors, ())
    assert (module.weight.tolist(), module.bias.tolist()) == ([[1.0, 2.0]], [3.0])


def test_a_tensor_of_another_shape_or_no_tensor_is_corrupt() -> None:
    _check_tensor("x", torch.zeros(2, 1), torch.ones(2, 1))
    for saved, found in ((torch.zeros(2), r"shape \(2,\)"), ([1, 2], "a list")):
        with pytest.raises(Corrupt, match=rf"x is a tensor of shape \(2, 1\), but the checkpoint has {found}"):
            _check_tensor("x", torch.zeros(2, 1), saved)


def test_state_of_an_optimizer_that_is_no_mapping_keeps_its_form() -> None:
    nothing: Any = None
    assert _laid_out(5, (2, 3), (1, 2), nothing) == 5
    assert _laid_out({"step": 5, "t": {"$tensor": "x", "stride": [1]}}, (2, 3), (1, 2), nothing) == {
        "step": 5,
        "t": {"$tensor": "x", "stride": [1]},
    }


def test_a_tensor_of_a_device_that_has_its_own_addresses_has_memory() -> None:
    assert _has_memory(torch.empty(3, device="meta")) is True
    assert _has_memory(torch.empty(3)) is True
    assert _has_memory(torch.empty(0, 5)) is True


@pytest.fixture
def layout() -> Layout:
    return make_layout([("a", "F32", (16, 2)), ("b", "F32", (3, 2))], {}, 0)


def test_tensors_in_memory_are_a_mapping_by_name_at_their_addresses(layout: Layout) -> None:
    staging = Staging(layout.size_bytes)
    views = TensorViews(staging, layout)
    assert (list(views), len(views)) == (["a", "b"], 2)
    for number, name in enumerate(("a", "b")):
        assert views.shape(name) == (16, 2) if name == "a" else (3, 2)
        assert views.address(number) == views[name].data_ptr()
    assert views.address(0) == staging.address + layout.entries[0].start


def test_a_tensor_is_staged_whatever_its_strides(layout: Layout) -> None:
    staging = Staging(layout.size_bytes)
    turned = torch.arange(6.0).reshape(2, 3).t()
    stage(staging, layout, 1, turned)
    stage(staging, layout, 0, torch.full((16, 2), 7.0))
    views = TensorViews(staging, layout)
    assert torch.equal(views["b"], turned)
    assert torch.equal(views["a"], torch.full((16, 2), 7.0))


def test_pending_parameters_are_found_in_what_a_function_is_given() -> None:
    one, two = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.ones(1))
    arrived: list[torch.nn.Parameter] = []
    for parameter in (one, two):
        attach(parameter, arrived.append)
    found = _pending_among([5, [one, (two, "x")], {"a": one, "b": [two]}, torch.zeros(1)])
    assert [id(each) for each in found] == [id(each) for each in (one, two, one, two)]
    assert torch.stack([one, two]).tolist() == [[0.0], [1.0]]
    assert [id(each) for each in arrived] == [id(one), id(two)]
    detach(one)
    assert type(one) is type(two) is torch.nn.Parameter
