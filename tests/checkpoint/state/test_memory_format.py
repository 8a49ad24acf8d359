"""The layout of tensors is a part of the state: training goes on with the layouts that it had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deepvm.checkpoint import Checkpointer
from deepvm.checkpoint.state.skeleton import Tensors
from deepvm.memnode import MemoryNode

WAIT_S = 20.0
LAST = torch.channels_last


def make(memory_format: torch.memory_format = LAST) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 8, 3))
    model = model.to(memory_format=memory_format)
    return model, torch.optim.Adam(model.parameters(), lr=0.1, fused=True)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, memory_format: torch.memory_format = LAST) -> None:
    torch.manual_seed(2)
    batch = torch.randn(4, 3, 16, 16).to(memory_format=memory_format)
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()


def save(url: str, **state: Any) -> None:
    with Checkpointer(state, url, on_error="raise") as ckpt:
        ckpt.save(2).wait("remote", WAIT_S)


def restore(url: str, *, lazy: bool = False, **state: Any) -> None:
    with Checkpointer(state, url) as ckpt:
        assert ckpt.restore(lazy=lazy) == 2
        ckpt.finish_restore()


def same(left: torch.nn.Module, right: torch.nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(left.parameters(), right.parameters(), strict=True))


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("kind", ["file", "memory"])
def test_channels_last_with_a_fused_optimizer_trains_on_bit_for_bit(tmp_path: Path, kind: str, lazy: bool) -> None:
    with MemoryNode(listen="127.0.0.1:0", capacity_bytes=2**24, block_bytes=2**16) as node:
        url = f"file://{tmp_path}" if kind == "file" else f"memory://{node.address}"
        model, optimizer = make()
        for _ in range(2):
            step(model, optimizer)
        save(url, model=model, optimizer=optimizer)
        again, resumed = make()
        restore(url, lazy=lazy, model=again, optimizer=resumed)
        for _ in range(3):
            step(model, optimizer)
            step(again, resumed)
        assert same(model, again)
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert p.stride() == q.stride()
        assert optimizer.state[p]["exp_avg"].stride() == resumed.state[q]["exp_avg"].stride()


@pytest.mark.parametrize(("saved", "live"), [(torch.contiguous_format, LAST), (LAST, torch.contiguous_format)])
def test_state_follows_the_layout_of_the_model_that_it_is_restored_into(
    tmp_path: Path, saved: torch.memory_format, live: torch.memory_format
) -> None:
    model, optimizer = make(saved)
    step(model, optimizer, saved)
    save(f"file://{tmp_path}", model=model, optimizer=optimizer)
    again, resumed = make(live)
    restore(f"file://{tmp_path}", model=again, optimizer=resumed)
    truth = {p: optimizer.state[p]["exp_avg"] for p in model.parameters()}
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert resumed.state[q]["exp_avg"].stride() == q.stride()
        assert torch.equal(resumed.state[q]["exp_avg"], truth[p])


def test_state_of_another_layout_than_its_parameter_stays_so(tmp_path: Path) -> None:
    model, optimizer = make(torch.contiguous_format)
    step(model, optimizer, torch.contiguous_format)
    model.to(memory_format=LAST)  # the optimizer's state stays as it was
    save(f"file://{tmp_path}", model=model, optimizer=optimizer)
    again, resumed = make(LAST)
    restore(f"file://{tmp_path}", model=again, optimizer=resumed)
    weight = next(again.parameters())
    assert not weight.is_contiguous()
    assert resumed.state[weight]["exp_avg"].is_contiguous()
    step(model, optimizer)
    step(again, resumed)
    assert same(model, again)


def test_an_older_checkpoint_without_layouts_follows_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = make()
    step(model, optimizer)
    add = Tensors.add
    with monkeypatch.context() as older:
        older.setattr(Tensors, "add", lambda *args: {k: v for k, v in add(*args).items() if k != "stride"})
        save(f"file://{tmp_path}", model=model, optimizer=optimizer)
    again, resumed = make()
    restore(f"file://{tmp_path}", model=again, optimizer=resumed)
    step(model, optimizer)
    step(again, resumed)
    assert same(model, again)


def test_plain_tensors_keep_their_layout_and_the_file_stays_plain(tmp_path: Path) -> None:
    values = {
        "last": torch.rand(2, 3, 4, 5).to(memory_format=LAST),
        "one channel": torch.rand(2, 1, 4, 5).to(memory_format=LAST),
        "turned": torch.rand(3, 4).t(),
        "complex": torch.randn(3, 4, dtype=torch.complex64).t(),
    }
    save(f"file://{tmp_path}", part={**values, "same": values["last"]})
    with Checkpointer({"part": {}}, f"file://{tmp_path}") as ckpt:
        assert ckpt.restore() == 2
        back = ckpt.state["part"]
    for name, value in values.items():
        assert torch.equal(back[name], value), name
        assert back[name].stride() == value.stride(), name
    assert back["same"] is back["last"]
    (file,) = tmp_path.rglob("*.safetensors")
    assert torch.equal(load_file(file)["part.last"], values["last"])
