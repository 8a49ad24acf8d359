"""Tensors without memory of their own are saved by what they hold, or refused by name; none is read at address 0."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from deepvm.checkpoint import Checkpointer
from deepvm.errors import CheckpointError, UsageError

WAIT_S = 20.0


class Scaled(torch.Tensor):
    """A wrapper as quantized optimizers have them: codes, a scale, and a setting."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, name: str) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, name: str) -> None:
        self.codes, self.scale, self.name_of_it = codes, scale, name

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], (self.name_of_it, torch.float32)

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Scaled:
        assert isinstance(context, tuple)
        return cls(inner["codes"], inner["scale"], context[0])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(str(func))


def scaled(seed: int, name: str = "a") -> Scaled:
    torch.manual_seed(seed)
    return Scaled(torch.randint(0, 100, (4, 8), dtype=torch.uint8), torch.rand(4), name)


def save(path: Path, **state: Any) -> None:
    with Checkpointer(state, f"file://{path}", on_error="raise") as ckpt:
        ckpt.save(1).wait("remote", WAIT_S)


class Part:
    """A component of the user's, whose state is asked for when it is saved."""

    def __init__(self, **state: Any) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = state


def refusal(path: Path, **values: Any) -> str:
    """What a save says of the values; the same as the constructor, where they are given as they are."""
    with Checkpointer({"part": Part(**values)}, f"file://{path}") as ckpt, pytest.raises(CheckpointError) as error:
        ckpt.save(1).wait("remote", WAIT_S)
    with pytest.raises(UsageError) as at_once:
        Checkpointer({"part": values}, f"file://{path}")
    assert str(at_once.value) in str(error.value)
    return str(error.value)


def emptied() -> torch.Tensor:
    tensor = torch.ones(10)[2:]
    tensor.untyped_storage().resize_(0)
    return tensor


def cut() -> torch.Tensor:
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(16)
    return tensor


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(3)


def opaque() -> torch.Tensor:
    class Opaque(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise NotImplementedError

    return torch.Tensor._make_wrapper_subclass(Opaque, (4, 4), dtype=torch.float32)


def nested(layout: torch.layout) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


def in_rows() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.eye(3).to_sparse_csr()


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: torch.empty(3, device="meta"), "meta device"),
        (emptied, "memory"),
        (cut, "memory"),
        (fake, "FakeTensor"),
        (opaque, "Opaque"),
        (lambda: torch._efficientzerotensor(3), "memory"),
        (lambda: torch.eye(3).to_sparse(), "sparse"),
        (in_rows, "sparse"),
        (quantized, "quantized"),
        (lambda: nested(torch.strided), "nested"),
        (lambda: nested(torch.jagged), "nested"),
        (torch.nn.UninitializedParameter, "initialized"),
    ],
)
def test_a_tensor_without_readable_memory_is_refused_by_name(
    tmp_path: Path, make: Callable[[], torch.Tensor], says: str
) -> None:
    said = refusal(tmp_path, odd=make())
    assert "part.odd" in said
    assert says in said


def test_a_model_that_is_sharded_later_is_refused_at_the_save_with_the_way_to_save_it(tmp_path: Path) -> None:
    code = f"""
        import torch, deepvm, torch.distributed as dist
        from torch.distributed.fsdp import fully_shard
        dist.init_process_group("gloo", init_method="file://{tmp_path}/meet", rank=0, world_size=1)
        model = torch.nn.Linear(64, 64)
        ckpt = deepvm.Checkpointer({{"model": model}}, "file://{tmp_path}/ckpt")
        fully_shard(model)
        try:
            ckpt.save(1).wait("remote", 20)
        except deepvm.errors.CheckpointError as error:
            print(error)
        ckpt.close()
        dist.destroy_process_group()
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
    )
    assert done.returncode == 0, done.stderr
    assert "model.weight is a DTensor" in done.stdout
    assert "deepvm.checkpoint.dcp" in done.stdout


def test_wrappers_of_equal_shape_are_not_taken_for_one(tmp_path: Path) -> None:
    saved = {"a": TwoTensor(torch.ones(3), torch.zeros(3)), "b": TwoTensor(torch.full((3,), 5.0), torch.ones(3))}
    save(tmp_path, **saved)
    again = {name: TwoTensor(torch.empty(3), torch.empty(3)) for name in saved}
    inner = again["a"].a
    with Checkpointer(again, f"file://{tmp_path}") as ckpt:
        assert ckpt.restore() == 1
    assert again["a"].a is inner  # in place
    for name, value in saved.items():
        assert torch.equal(again[name].a, value.a)
        assert torch.equal(again[name].b, value.b)


def test_a_wrapper_within_a_wrapper_comes_back(tmp_path: Path) -> None:
    deep = TwoTensor(TwoTensor(torch.ones(3), torch.zeros(3)), TwoTensor(torch.full((3,), 2.0), torch.full((3,), 3.0)))
    save(tmp_path, part={"deep": deep})
    with Checkpointer({"part": {}}, f"file://{tmp_path}") as ckpt:
        assert ckpt.restore() == 1
        back = ckpt.state["part"]["deep"]
    assert isinstance(back, TwoTensor)
    assert back.b.b.tolist() == [3.0, 3.0, 3.0]


class Quantized(torch.nn.Module):
    def __init__(self, seed: int, name: str = "a") -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(scaled(seed, name), requires_grad=False)
        self.plain = torch.nn.Parameter(torch.full((3,), float(seed)))


@pytest.mark.parametrize("lazy", [False, True])
def test_a_modules_wrappers_are_filled_in_place(tmp_path: Path, lazy: bool) -> None:
    saved, model = Quantized(1), Quantized(2)
    weight, codes = model.weight, model.weight.codes
    save(tmp_path, model=saved)
    with Checkpointer({"model": model}, f"file://{tmp_path}") as ckpt:
        assert ckpt.restore(lazy=lazy) == 1
        ckpt.finish_restore()
    assert model.weight is weight
    assert model.weight.codes is codes
    assert torch.equal(codes, saved.weight.codes)
    assert torch.equal(model.weight.scale, saved.weight.scale)
    assert torch.equal(model.plain, saved.plain)


def test_a_wrapper_that_changes_between_saves_is_saved_as_it_is(tmp_path: Path) -> None:
    model, again = Quantized(1), Quantized(2)
    with Checkpointer({"model": model}, f"file://{tmp_path}", on_error="raise") as ckpt:
        ckpt.save(1).wait("remote", WAIT_S)
        model.weight.codes = torch.full((4, 8), 7, dtype=torch.uint8)
        ckpt.save(2).wait("remote", WAIT_S)
    with Checkpointer({"model": again}, f"file://{tmp_path}") as ckpt:
        assert ckpt.restore() == 2
    assert torch.equal(again.weight.codes, model.weight.codes)


def test_a_wrapper_with_other_settings_is_reported(tmp_path: Path) -> None:
    save(tmp_path, model=Quantized(1))
    with (
        Checkpointer({"model": Quantized(2, "b")}, f"file://{tmp_path}") as ckpt,
        pytest.raises(CheckpointError, match=r"model\.weight"),
    ):
        ckpt.restore()


def test_a_wrapper_that_holds_a_tensor_of_another_shape_is_reported_with_both(tmp_path: Path) -> None:
    save(tmp_path, model=Quantized(1))
    model = Quantized(2)
    model.weight.scale = torch.rand(3)
    with (
        Checkpointer({"model": model}, f"file://{tmp_path}") as ckpt,
        pytest.raises(CheckpointError, match=r"weight\.scale is torch\.float32 \(3,\), saved torch\.float32 \(4,\)"),
    ):
        ckpt.restore()


@pytest.mark.parametrize("lazy", [False, True])
def test_an_optimizers_wrappers_come_back(tmp_path: Path, lazy: bool) -> None:
    def make(seed: int) -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
        model = torch.nn.Linear(8, 4, bias=False)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    model, optimizer = make(1)
    optimizer.state[model.weight] = {"step": 3, "moment": TwoTensor(torch.rand(4, 8), torch.rand(4, 8))}
    save(tmp_path, model=model, optimizer=optimizer)
    again, resumed = make(2)
    with Checkpointer({"model": again, "optimizer": resumed}, f"file://{tmp_path}") as ckpt:
        assert ckpt.restore(lazy=lazy) == 1
        ckpt.finish_restore()
    back, was = resumed.state[again.weight]["moment"], optimizer.state[model.weight]["moment"]
    assert isinstance(back, TwoTensor)
    assert torch.equal(back.a, was.a)
    assert torch.equal(back.b, was.b)


def test_a_wrapper_whose_setting_is_no_plain_value_is_refused(tmp_path: Path) -> None:
    odd = scaled(1)
    odd.name_of_it = object()  # type: ignore[assignment]
    assert "part.odd" in refusal(tmp_path, odd=odd)


def test_every_ordinary_kind_of_tensor_comes_back(tmp_path: Path) -> None:
    values = {
        "expanded": torch.rand(3, 1).expand(3, 4),
        "transposed": torch.rand(3, 4).t(),
        "every other": torch.rand(10)[::2],
        "zero-size": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "bool": torch.tensor([True, False]),
        "complex": torch.randn(2, 3, dtype=torch.complex64),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "negative": torch.randn(1, dtype=torch.complex64).conj().imag,
        "float8": torch.rand(4).to(torch.float8_e4m3fn),
        "half complex": torch.view_as_complex(torch.randn(3, 2).to(torch.float16)),
        "array": np.arange(6.0).reshape(2, 3),
        "column-major": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "dates": np.array(["2020-01-01", "2021-06-30"], dtype="datetime64[D]"),
        "words": np.array(["a", "word"]),
        "big-endian": np.arange(3, dtype=">i4"),
    }
    save(tmp_path, part=values)
    with Checkpointer({"part": {}}, f"file://{tmp_path}") as ckpt:
        assert ckpt.restore() == 1
        back = ckpt.state["part"]
    assert back.keys() == values.keys()
    for name, value in values.items():
        found = back[name]
        if isinstance(value, np.ndarray):
            assert (found.dtype, found.strides) == (value.dtype, value.strides), name
            assert np.array_equal(found, value), name
        else:
            assert (found.dtype, found.shape) == (value.dtype, value.shape), name
            assert found.tolist() == value.tolist(), name


@pytest.mark.parametrize("array", [np.array([object()]), np.zeros(2, dtype=[("a", "i4"), ("b", "f8")])])
def test_an_array_that_cannot_be_saved_is_refused_by_name(tmp_path: Path, array: Any) -> None:
    assert "part.array" in refusal(tmp_path, array=array)


def test_a_parameter_turned_in_its_own_memory_between_saves_is_saved_as_it_is(tmp_path: Path) -> None:
    model, again = torch.nn.Linear(4, 6, bias=False), torch.nn.Linear(6, 4, bias=False)
    with Checkpointer({"model": model}, f"file://{tmp_path}", on_error="raise") as ckpt:
        ckpt.save(1).wait("remote", WAIT_S)
        model.weight.data = model.weight.data.t()
        ckpt.save(2).wait("remote", WAIT_S)
    with Checkpointer({"model": again}, f"file://{tmp_path}") as ckpt:
        assert ckpt.restore() == 2
    assert torch.equal(again.weight, model.weight)


def test_a_model_on_the_meta_device_is_reported_before_anything_is_loaded(tmp_path: Path) -> None:
    save(tmp_path, model=torch.nn.Linear(2, 2))
    with torch.device("meta"):
        model = torch.nn.Linear(2, 2)
    with (
        Checkpointer({"model": model}, f"file://{tmp_path}") as ckpt,
        pytest.raises(CheckpointError, match=r"model\.weight .*meta"),
    ):
        ckpt.restore()
