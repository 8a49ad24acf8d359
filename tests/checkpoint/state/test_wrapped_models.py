"""Models in DDP, DataParallel and torch.compile are saved and restored by the names that they have without these."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.nn.parallel import DataParallel, DistributedDataParallel

from deepvm.checkpoint import Checkpointer
from deepvm.checkpoint.state.unwrapping import clean_names, matched, without_wrappers
from deepvm.errors import CheckpointError

WAIT_S = 20.0
Model = torch.nn.Module


@pytest.fixture(autouse=True)
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def net(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))


def compiled(model: Model) -> Model:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


class Within(torch.nn.Module):
    """A model of which one part is wrapped."""

    def __init__(self, part: Model) -> None:
        super().__init__()
        self.part = part
        self.head = torch.nn.Linear(4, 2)


class Named(torch.nn.Module):
    """A model whose own parts have the names that wrappers use."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.weight = torch.nn.Parameter(torch.rand(3))
        self.module = torch.nn.ParameterDict({"weight": torch.nn.Parameter(torch.rand(3))})


WRAPS: dict[str, Callable[[Model], Model]] = {
    "plain": lambda model: model,
    "ddp": DistributedDataParallel,
    "data parallel": DataParallel,
    "compiled": compiled,
    "compiled ddp": lambda model: compiled(DistributedDataParallel(model)),
    "ddp of compiled": lambda model: DistributedDataParallel(compiled(model)),
}


def save(path: Path, **state: Any) -> None:
    with Checkpointer(state, f"file://{path}", on_error="raise") as ckpt:
        ckpt.save(1).wait("remote", WAIT_S)


def restore(path: Path, *, lazy: bool = False, **state: Any) -> None:
    with Checkpointer(state, f"file://{path}") as ckpt:
        assert ckpt.restore(lazy=lazy) == 1
        ckpt.finish_restore()


def same(left: Model, right: Model) -> bool:
    pairs = zip(left.state_dict().values(), right.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def names(path: Path) -> list[str]:
    (file,) = path.rglob("*.safetensors")
    with safe_open(file, "pt") as found:
        return sorted(name for name in found.keys() if name.startswith("model."))  # noqa: SIM118 - no mapping


@pytest.mark.parametrize(("saved", "live"), list(itertools.permutations(WRAPS, 2)))
def test_what_is_saved_in_one_wrapper_is_restored_in_another(tmp_path: Path, saved: str, live: str) -> None:
    truth, model = net(1), net(2)
    save(tmp_path / "a", model=WRAPS[saved](truth))
    restore(tmp_path / "a", model=WRAPS[live](model))
    assert same(truth, model)
    assert names(tmp_path / "a") == sorted(f"model.{name}" for name in truth.state_dict())


@pytest.mark.parametrize("saved", ["plain", "ddp", "compiled"])
@pytest.mark.parametrize("live", ["plain", "ddp"])
def test_a_restore_on_demand_sees_through_wrappers_too(tmp_path: Path, saved: str, live: str) -> None:
    truth, model = net(1), net(2)
    save(tmp_path / "a", model=WRAPS[saved](truth))
    wrapped = WRAPS[live](model)
    with Checkpointer({"model": wrapped}, f"file://{tmp_path / 'a'}") as ckpt:
        assert ckpt.restore(lazy=True) == 1
        assert torch.equal(wrapped.eval()(torch.ones(2, 4)), truth.eval()(torch.ones(2, 4)))
        ckpt.finish_restore()
    assert same(truth, model)


@pytest.mark.parametrize("wrap", ["ddp", "compiled", "ddp of compiled"])
def test_a_wrapper_within_a_model_is_seen_through(tmp_path: Path, wrap: str) -> None:
    truth, model = Within(net(1)), Within(net(2))
    wrapped = Within(net(3))
    wrapped.load_state_dict(truth.state_dict())
    wrapped.part = WRAPS[wrap](wrapped.part)
    save(tmp_path / "a", model=wrapped)
    restore(tmp_path / "a", model=model)
    assert same(truth, model)
    save(tmp_path / "b", model=truth)
    model.part = WRAPS[wrap](net(4))
    restore(tmp_path / "b", model=model)
    assert same(truth, model)


@pytest.mark.parametrize(("saved", "live"), list(itertools.product(("plain", "ddp", "compiled ddp"), repeat=2)))
def test_parts_that_are_called_as_a_wrappers_stay_right(tmp_path: Path, saved: str, live: str) -> None:
    truth, model = Named(1), Named(2)
    save(tmp_path / "a", model=WRAPS[saved](truth))
    restore(tmp_path / "a", model=WRAPS[live](model))
    assert same(truth, model)


@pytest.mark.parametrize("wrap", ["ddp", "compiled", "compiled ddp"])
@pytest.mark.parametrize("make", [net, Named])
def test_an_older_checkpoint_with_the_names_of_a_wrapper_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrap: str, make: Callable[[int], Model]
) -> None:
    truth = make(1)
    with monkeypatch.context() as older:
        older.setattr("deepvm.checkpoint.state.capture.without_wrappers", lambda _, state: state)
        save(tmp_path / "a", model=WRAPS[wrap](truth))
    assert all("module." in name or "_orig_mod." in name for name in names(tmp_path / "a"))
    for live in ("plain", wrap, "ddp"):
        model = make(2)
        restore(tmp_path / "a", model=WRAPS[live](model))
        assert same(truth, model), live


def test_a_models_own_wrapper_is_left_out_where_names_differ_by_nothing_else(tmp_path: Path) -> None:
    class Mine(torch.nn.Module):
        def __init__(self, module: Model) -> None:
            super().__init__()
            self.module = module

    truth, model = net(1), net(2)
    save(tmp_path / "a", model=Mine(truth))
    restore(tmp_path / "a", model=Mine(model))
    assert same(truth, model)
    model = net(3)
    restore(tmp_path / "a", model=model)
    assert same(truth, model)


def test_a_wrapped_part_that_a_model_has_twice_is_seen_through_at_both_places() -> None:
    model = torch.nn.Module()
    model.a = model.b = DataParallel(torch.nn.Linear(2, 2))
    found = without_wrappers(model, model.state_dict())
    assert list(found) == ["a.weight", "a.bias", "b.weight", "b.bias"]
    assert found["a.weight"].data_ptr() == found["b.weight"].data_ptr() == model.a.module.weight.data_ptr()
    assert clean_names(model, ["a", "b.module", "c"]) == {"a": "a", "b.module": "b", "c": "c"}
    assert without_wrappers(model, 5) == 5
    assert without_wrappers(model, {5: 6}) == {5: 6}


def test_names_that_two_saved_tensors_could_be_for_are_not_guessed() -> None:
    model = torch.nn.Module()
    assert matched(model, ["a.w"], ["module.a.w", "a.module.w", "b"]) == {}


def test_an_optimizers_own_names_of_parameters_stay_those_of_the_model_here(tmp_path: Path) -> None:
    def make(model: Model) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.named_parameters(), lr=0.1)

    wrapped, model = DistributedDataParallel(net(1)), net(2)
    save(tmp_path / "a", model=wrapped, optimizer=make(wrapped))
    optimizer = make(model)
    restore(tmp_path / "a", model=model, optimizer=optimizer)
    assert optimizer.param_groups[0]["param_names"] == [name for name, _ in model.named_parameters()]


def test_a_compiled_model_trains_on_bit_for_bit_from_what_ddp_saved(tmp_path: Path) -> None:
    def step(model: Model, optimizer: torch.optim.Optimizer) -> None:
        torch.manual_seed(7)
        model(torch.rand(8, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    truth = net(1)
    saved, optimizer = DistributedDataParallel(truth), torch.optim.AdamW(truth.parameters())
    step(saved, optimizer)
    save(tmp_path / "a", model=saved, optimizer=optimizer)
    model = net(2)
    live, resumed = compiled(model), torch.optim.AdamW(model.parameters())
    restore(tmp_path / "a", model=live, optimizer=resumed)
    step(truth, optimizer)
    step(live, resumed)
    assert same(truth, model)


def test_another_model_is_still_reported(tmp_path: Path) -> None:
    save(tmp_path / "a", model=DistributedDataParallel(net(1)))
    with (
        Checkpointer({"model": torch.nn.Linear(4, 4)}, f"file://{tmp_path / 'a'}") as ckpt,
        pytest.raises(CheckpointError, match=r"another model: model\.weight is not in the checkpoint"),
    ):
        ckpt.restore()
