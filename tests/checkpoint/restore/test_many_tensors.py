"""A restore does work by the number of tensors, and not by its square."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from deepvm.checkpoint import Checkpointer
from deepvm.checkpoint.state.optimizer_state import with_numbers


def made(count: int) -> dict[str, Any]:
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(count)])
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def calls_of_a_restore(path: Path, count: int) -> int:
    with Checkpointer(made(count), f"file://{path}", on_error="raise") as ckpt:
        ckpt.save(1).wait("remote", 60)
    calls: Counter[str] = Counter()
    with Checkpointer(made(count), f"file://{path}") as ckpt:
        sys.setprofile(lambda _, event, __: calls.update((event,)))
        try:
            ckpt.restore()
        finally:
            sys.setprofile(None)
    return calls["call"] + calls["c_call"]


def test_four_times_the_tensors_take_four_times_the_calls(tmp_path: Path) -> None:
    few, many = (calls_of_a_restore(tmp_path / str(count), count) for count in (100, 400))
    assert many < 4.2 * few


def test_torch_finds_a_parameters_group_without_walking_it() -> None:
    class Number(int):
        compared = 0

        def __eq__(self, other: object) -> bool:
            Number.compared += 1
            return super().__eq__(other)

        __hash__ = int.__hash__

    state = with_numbers({"state": {}, "param_groups": [{"params": [Number(i) for i in range(1000)]}]})
    before = Number.compared
    assert all(number in state["param_groups"][0]["params"] for number in range(1000))
    assert Number.compared - before < 3000
