"""An eager restore lets parameters keep the memory that it received them in, and copies where somebody would see."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepvm.checkpoint import Checkpointer
from deepvm.memnode import MemoryNode

WAIT_S = 10.0
SIZE = 128  # a weight of it is as large as what is given, a bias is copied


class Two(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(SIZE, SIZE)
        self.second = torch.nn.Linear(SIZE, SIZE, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


@pytest.fixture
def store() -> Any:
    with MemoryNode(listen="127.0.0.1:0", capacity_bytes=2**26, block_bytes=2**16) as node:
        yield f"memory://{node.address}"


def save(store: str, **state: Any) -> None:
    with Checkpointer(state, store, on_error="raise") as ckpt:
        ckpt.save(1).wait("remote", WAIT_S)


def restore(store: str, **state: Any) -> None:
    with Checkpointer(state, store) as ckpt:
        assert ckpt.restore() == 1


def same(left: torch.nn.Module, right: torch.nn.Module) -> bool:
    pairs = zip(left.state_dict().values(), right.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def addresses(model: torch.nn.Module) -> list[int]:
    return [p.data_ptr() for p in model.parameters()]


def test_parameters_keep_what_was_received_for_them(store: str) -> None:
    saved, model = Two(0), Two(1)
    save(store, model=saved)
    parameters, before = list(model.parameters()), addresses(model)
    restore(store, model=model)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert same(saved, model)
    assert [a == b for a, b in zip(before, addresses(model), strict=True)] == [False, True, False]


def test_a_parameter_that_takes_the_received_memory_is_not_written_again(store: str) -> None:
    saved, model = Two(0), Two(1)
    save(store, model=saved)
    before, versions = addresses(model), [p._version for p in model.parameters()]
    restore(store, model=model)
    for parameter, address, version in zip(model.parameters(), before, versions, strict=True):
        assert (parameter.data_ptr() == address) == (parameter._version > version)


def test_a_view_an_array_and_shared_memory_see_the_new_bytes(store: str) -> None:
    saved, model = Two(0), Two(1)
    save(store, model=saved)
    view = model.first.weight.detach()[0]
    array = model.first.bias.detach().numpy()
    model.second.weight.data.share_memory_()
    before = addresses(model)
    restore(store, model=model)
    assert addresses(model) == before
    assert torch.equal(view, saved.first.weight[0])
    assert torch.equal(torch.from_numpy(array), saved.first.bias)
    assert same(saved, model)


def test_parameters_saved_as_one_and_restored_as_two_do_not_become_one(store: str) -> None:
    saved, model = Two(0), Two(1)
    saved.second.weight = saved.first.weight
    save(store, model=saved)
    restore(store, model=model)
    assert same(saved, model)
    with torch.no_grad():
        model.first.weight.zero_()
    assert torch.equal(model.second.weight, saved.second.weight)


def test_a_parameter_and_what_was_saved_with_its_memory_do_not_become_one(store: str) -> None:
    saved, model = Two(0), Two(1)
    save(store, model=saved, best={"weight": saved.first.weight.detach()})
    with Checkpointer({"model": model, "best": {"weight": torch.empty(SIZE, SIZE)}}, store) as ckpt:
        assert ckpt.restore() == 1
        best = ckpt.state["best"]["weight"]
    with torch.no_grad():
        model.first.weight.zero_()
    assert torch.equal(best, saved.first.weight)


def test_tied_parameters_stay_tied(store: str) -> None:
    saved, model = Two(0), Two(1)
    for each in (saved, model):
        each.second.weight = each.first.weight
    save(store, model=saved)
    restore(store, model=model)
    assert model.second.weight is model.first.weight
    assert same(saved, model)


def test_a_compiled_model_keeps_its_memory(store: str) -> None:
    saved, model = Two(0), Two(1)
    save(store, model=saved)
    model.compile(backend="eager")
    before = addresses(model)
    restore(store, model=model)
    assert addresses(model) == before
    assert same(saved, model)


def test_a_module_that_loads_by_itself_is_given_everything(store: str) -> None:
    class Loud(Two):
        loaded: tuple[str, ...] = ()

        def load_state_dict(self, state: Any) -> None:  # type: ignore[override]
            self.loaded = tuple(state)
            super().load_state_dict(state)

    saved, model = Two(0), Loud(1)
    save(store, model=saved)
    restore(store, model=model)
    assert model.loaded == ("first.weight", "first.bias", "second.weight")
    assert same(saved, model)


def test_a_forked_process_changes_only_its_own(store: str) -> None:
    saved, model = Two(0), Two(1)
    save(store, model=saved)
    restore(store, model=model)
    child = os.fork()
    if not child:
        model.first.weight.data.numpy()[:] = 0
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert same(saved, model)


def test_a_mapped_file_is_copied_from(tmp_path: Path) -> None:
    """A page of it would be copied anyway, at the first write to it, and at several times the price."""
    saved, model = Two(0), Two(1)
    save(str(tmp_path), model=saved)
    before = addresses(model)
    restore(str(tmp_path), model=model)
    assert addresses(model) == before
    assert same(saved, model)


def test_training_continues_and_saves_what_it_computes(store: str) -> None:
    saved, model, again = Two(0), Two(1), Two(2)
    save(store, model=saved)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer({"model": model}, store, on_error="raise") as ckpt:
        assert ckpt.restore() == 1
        model(torch.ones(1, SIZE)).sum().backward()
        optimizer.step()
        ckpt.save(2).wait("remote", WAIT_S)
    with Checkpointer({"model": again}, store) as ckpt:
        assert ckpt.restore() == 2
    assert same(model, again)
    assert not same(model, saved)


@pytest.mark.parametrize("lazy", [False, True])
def test_the_memory_of_an_optimizer_goes_with_it_though_parameters_came_beside_it(store: str, lazy: bool) -> None:
    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(1024, 1024)
        return model, torch.optim.AdamW(model.parameters())

    saved, optimizer = make()
    saved(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    save(store, model=saved, optimizer=optimizer)
    model, again = make()
    with Checkpointer({"model": model, "optimizer": again}, store) as ckpt:
        assert ckpt.restore(lazy=lazy) == 1
        ckpt.finish_restore()
        assert torch.equal(again.state[model.weight]["exp_avg"], optimizer.state[saved.weight]["exp_avg"])
        ckpt._snapshotter.warming.close()  # or it takes memory meanwhile
        before = resident_bytes()
        ckpt.state.clear()
        del again
        gc.collect()
    assert before - resident_bytes() > 7 * 2**20
    assert same(saved, model)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Odd(torch.nn.Module):
    """Parameters whose sizes are not multiples of 64 bytes: in the file, all but the first lie unaligned."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(20_011)) for _ in range(5)])

    def forward(self) -> torch.Tensor:
        return torch.stack([weight.square().mean() for weight in self.weights]).sum()


@pytest.mark.parametrize("lazy", [False, True])
def test_odd_sizes_come_aligned_and_are_not_copied_again(
    store: str, monkeypatch: pytest.MonkeyPatch, lazy: bool
) -> None:
    saved = Odd(0)
    optimizer = torch.optim.Adam(saved.parameters())
    saved().backward()
    optimizer.step()
    save(store, model=saved, optimizer=optimizer)
    model = Odd(1)
    again = torch.optim.Adam(model.parameters())
    copied: list[int] = []
    clone = torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda t, **more: (copied.append(t.nbytes), clone(t, **more))[1])
    with Checkpointer({"model": model, "optimizer": again}, store) as ckpt:
        assert ckpt.restore(lazy=lazy) == 1
        ckpt.finish_restore()
    assert same(model, saved)
    for mine, theirs in zip(model.parameters(), saved.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(again.state[mine][key], optimizer.state[theirs][key])
            assert again.state[mine][key].data_ptr() % 64 == 0
        assert mine.data_ptr() % 64 == 0
    assert max(copied, default=0) < 1000  # only what is small


def test_an_array_by_dlpack_keeps_its_memory(store: str) -> None:
    saved = torch.nn.Linear(SIZE, SIZE)
    save(store, model=saved)
    model = torch.nn.Linear(SIZE, SIZE).requires_grad_(False)
    before = model.weight.data_ptr()
    array = np.from_dlpack(model.weight)
    with Checkpointer({"model": model}, store) as ckpt:
        assert ckpt.restore() == 1
    assert same(model, saved)
    assert model.weight.data_ptr() == before  # copied into what the array looks at, too
    assert np.array_equal(array, saved.weight.detach().numpy())
