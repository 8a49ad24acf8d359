"""What people give to a Checkpointer: wrapped optimizers, prepared loaders, steps of other types, sharded models,
and what is no state at all. It works, or one sentence says what to give instead."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import deepvm
from deepvm.checkpoint import Checkpointer
from deepvm.errors import CheckpointError, UsageError
from deepvm.memnode import MemoryNode

WAIT_S = 20.0


class Prepared(torch.optim.Optimizer):
    """A wrapper as Accelerate makes it: an Optimizer by class, whose own __init__ never ran."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)


class Passing:
    """A wrapper as Lightning makes it: all that it has not itself is the optimizer's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def step(self) -> None:
        self._optimizer.step()


class Averaging(Prepared):
    """A wrapper that has something to save itself."""

    rounds = 0

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.optimizer.state_dict(), "rounds": self.rounds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["inner"])
        self.rounds = state["rounds"]


def work(wrap: Any, seed: int) -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(64, 64)
    return model, wrap(torch.optim.AdamW(model.parameters()))


def train(model: torch.nn.Module, optimizer: Any) -> None:
    model(torch.ones(2, 64)).pow(2).mean().backward()
    optimizer.step()


def moments(optimizer: Any) -> list[torch.Tensor]:
    inner = getattr(optimizer, "optimizer", None) or optimizer._optimizer
    return [values["exp_avg"].clone() for values in inner.state.values()]


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("wrap", [Prepared, Passing, Averaging])
def test_an_optimizer_in_a_wrapper_is_saved_as_it_was_at_the_save_and_restored(
    tmp_path: Path, wrap: Any, lazy: bool
) -> None:
    model, optimizer = work(wrap, 0)
    train(model, optimizer)
    if wrap is Averaging:
        optimizer.rounds = 7
    with MemoryNode(capacity_bytes=64 * 2**20) as node:
        store = f"memory://{node.address}"
        with Checkpointer({"model": model, "optimizer": optimizer}, store, on_error="raise") as ckpt:
            weight, expected = model.weight.detach().clone(), moments(optimizer)
            handle = ckpt.save(1)
            train(model, optimizer)  # its hook is called, though the step is the wrapper's
            handle.wait("remote", WAIT_S)
        other, fresh = work(wrap, 1)
        state = {"model": other, "optimizer": fresh}
        with Checkpointer(state, store) as ckpt:
            assert ckpt.restore(lazy=lazy) == 1
            ckpt.finish_restore()
            assert state["optimizer"] is fresh
            assert torch.equal(other.weight, weight)
            assert all(map(torch.equal, moments(fresh), expected))
            assert wrap is not Averaging or fresh.rounds == 7
            assert not ckpt.status().drift


@pytest.mark.parametrize("wrap", [Prepared, Passing])
def test_the_hook_is_at_the_optimizer_that_steps_and_a_scheduler_is_none(tmp_path: Path, wrap: Any) -> None:
    _, optimizer = work(wrap, 0)
    inner = optimizer.optimizer if wrap is Prepared else optimizer._optimizer
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 2)
    ckpt = Checkpointer({"optimizer": optimizer, "scheduler": scheduler}, f"file://{tmp_path}")
    assert len(inner._optimizer_step_pre_hooks) >= 1
    ckpt.close()
    assert len(inner._optimizer_step_pre_hooks) == 0


def test_what_accelerate_prepares_is_saved_and_restored(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)

    def build() -> Any:
        model, optimizer = work(lambda found: found, 0)
        loader = deepvm.resumable(DataLoader(TensorDataset(torch.randn(64, 64)), batch_size=4, shuffle=True))
        return accelerator.prepare(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2), loader)

    names = ("model", "optimizer", "scheduler", "loader")
    parts = build()
    with Checkpointer(dict(zip(names, parts, strict=True)), f"file://{tmp_path}", policy="every 1 steps") as ckpt:
        for n, (batch,) in enumerate(parts[3], 1):
            accelerator.backward(parts[0](batch).mean())
            parts[1].step()
            parts[2].step()
            ckpt.step(n)
            if n == 3:
                break
    assert ckpt.status().failed == 0
    again = build()
    with Checkpointer(dict(zip(names, again, strict=True)), f"file://{tmp_path}") as ckpt:
        assert ckpt.restore() == 3
    assert torch.equal(again[0].weight, parts[0].weight)
    assert again[3].state_dict() == parts[3].state_dict()


class Shard(DataLoader[Any]):
    """A loader as Accelerate makes it: it has a state_dict, which works only where the loader within has one."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader.dataset, batch_size=loader.batch_size)
        self.base_dataloader = loader

    def state_dict(self) -> Any:
        return self.base_dataloader.state_dict()  # type: ignore[attr-defined]

    def load_state_dict(self, state: Any) -> None:
        self.base_dataloader.load_state_dict(state)  # type: ignore[attr-defined]


def test_for_a_prepared_loader_the_error_says_to_make_the_inner_one_resumable(tmp_path: Path) -> None:
    prepared = Shard(DataLoader(TensorDataset(torch.randn(8, 2)), batch_size=2))
    inside = r"accelerator\.prepare\(deepvm\.resumable\(loader\)\)"
    with pytest.raises(UsageError, match=inside):
        deepvm.resumable(prepared)
    with pytest.raises(UsageError, match="'loader' is a Shard around a DataLoader.*" + inside):
        Checkpointer({"loader": prepared}, f"file://{tmp_path}")


# --- steps ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [np.int64(5), torch.tensor(5), np.array(5), np.uint8(5)])
def test_any_integer_is_a_step(tmp_path: Path, step: Any) -> None:
    values = {"a": torch.ones(4)}
    with Checkpointer(values, f"file://{tmp_path}", policy="every 1 steps", on_error="raise") as ckpt:
        handle = ckpt.step(step)
        assert handle is not None
        handle.wait("durable", WAIT_S)
        assert type(handle.step) is int
        assert ckpt.restore(step=step) == 5
    with Checkpointer(values, f"file://{tmp_path}/saved", on_error="raise") as ckpt:
        ckpt.save(step).wait("durable", WAIT_S)


@pytest.mark.parametrize("step", [1.5, "3", 2**70, -1, True, None, torch.tensor(1.5), torch.tensor(True), np.arange(3)])
def test_what_is_no_step_is_one_clear_error(tmp_path: Path, step: Any) -> None:
    with Checkpointer({"a": 1}, f"file://{tmp_path}", policy="every 1 steps") as ckpt:
        calls = [ckpt.step, ckpt.save] + ([ckpt.restore] if step is not None else [])
        for call in calls:
            with pytest.raises(UsageError, match=r"the step is .*: pass a whole number from 0 to 9223372036854775807"):
                call(step)
        assert ckpt.status().failed == 0


# --- what is no state -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (torch.nn.Linear(2, 2), "the state is a Linear: pass a dict of names"),
        ([torch.nn.Linear(2, 2)], "the state is a list: pass a dict of names"),
        ({1: torch.nn.Linear(2, 2)}, "the state has the name 1, a int: use text"),
    ],
)
def test_what_is_no_mapping_of_names_is_refused(tmp_path: Path, state: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Checkpointer(state, f"file://{tmp_path}")


def test_a_policy_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the policy is 5: pass a text such as 'every 100 steps'"):
        Checkpointer({"a": 1}, f"file://{tmp_path}", policy=5)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "key"), [("model", "model.weight"), ("optimizer", "a parameter of optimizer")])
def test_a_tensor_of_which_each_rank_has_a_part_is_refused_before_the_first_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, key: str
) -> None:
    class DTensor(torch.nn.Parameter):
        """A stand-in: the next test has real ones, and takes seconds."""

    model = torch.nn.Linear(2, 2)
    given = model if name == "model" else torch.optim.SGD(model.parameters())
    model.weight.__class__ = DTensor
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", SimpleNamespace(DTensor=DTensor))
    with pytest.raises(UsageError, match=f"^{key} is a DTensor, of which each rank has a part"):
        Checkpointer({name: given}, f"file://{tmp_path}")


def test_a_sharded_model_or_optimizer_is_refused_when_the_checkpointer_is_made(tmp_path: Path) -> None:
    script = """
        import sys, torch
        from torch.distributed.fsdp import fully_shard
        from deepvm.checkpoint import Checkpointer
        from deepvm.errors import CheckpointError, UsageError
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        from torch.distributed.device_mesh import init_device_mesh
        model = torch.nn.Linear(8, 8)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        for state in ({"model": model}, {"optimizer": torch.optim.AdamW(model.parameters())}):
            try:
                Checkpointer(state, sys.argv[1])
            except UsageError as error:
                print(error)
        torch.distributed.destroy_process_group()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), f"file://{tmp_path}"],
        capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    first, second = done.stdout.splitlines() or ("", done.stderr)
    assert first.startswith("model.weight is a DTensor, of which each rank has a part")
    assert second.startswith("a parameter of optimizer is a DTensor")
    assert "DeepvmWriter(URL, run=RUN, step=N)" in first


# --- expanded tensors -----------------------------------------------------------------------------------------------


class Expanded(torch.nn.Module):
    def __init__(self, value: float, *, own_loading: bool) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([value, value + 1]).expand(3, 2))
        if own_loading:
            self.register_load_state_dict_post_hook(lambda *_: None)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("own_loading", [False, True])
def test_an_expanded_tensor_is_restored_and_stays_expanded(tmp_path: Path, own_loading: bool, lazy: bool) -> None:
    def state(value: float) -> dict[str, Any]:
        return {"model": Expanded(value, own_loading=own_loading), "one": torch.tensor([[value]]).expand(4, 3)}

    with Checkpointer(state(5.0), f"file://{tmp_path}", on_error="raise") as ckpt:
        ckpt.save(1).wait("durable", WAIT_S)
    fresh = state(0.0)
    with Checkpointer(fresh, f"file://{tmp_path}") as ckpt:
        assert ckpt.restore(lazy=lazy) == 1
        ckpt.finish_restore()
    assert fresh["model"].scale.tolist() == [[5.0, 6.0]] * 3
    assert fresh["model"].scale.stride() == (0, 1)
    assert fresh["one"].tolist() == [[5.0] * 3] * 4


def test_a_tensor_that_was_not_expanded_is_restored_into_one_that_is(tmp_path: Path) -> None:
    saved = torch.arange(12.0).reshape(4, 3)
    with Checkpointer({"one": saved}, f"file://{tmp_path}", on_error="raise") as ckpt:
        ckpt.save(1).wait("durable", WAIT_S)
    state = {"one": torch.zeros(3).expand(4, 3)}
    with Checkpointer(state, f"file://{tmp_path}") as ckpt:
        ckpt.restore()
    assert torch.equal(state["one"], saved)


# --- a node that is too small ---------------------------------------------------------------------------------------


def test_a_checkpoint_larger_than_the_node_is_reported_with_what_it_needs() -> None:
    state = {"a": torch.randn(4 * 2**20)}
    words = r"needs 16.*MB?.* in all: start it with a larger --capacity"
    with MemoryNode(capacity_bytes=8 * 2**20) as node, Checkpointer(state, f"memory://{node.address}") as ckpt:
        handle = ckpt.save(1)
        with pytest.raises(CheckpointError, match=words):
            handle.wait("remote", WAIT_S)
