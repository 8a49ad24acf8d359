"""Whether the state is still that of the last step, and why it is not saved if it is not."""

from __future__ import annotations

from typing import Any

import torch

from deepvm.checkpoint.ending.state_at_step import StateAtStep
from deepvm.checkpoint.ending.unsaved import Unsaved
from deepvm.checkpoint.snapshot import prefault


class Sharded(torch.nn.Linear):
    """As FSDP's modules: each forward pass gives its parameters other memory."""


Sharded.__module__ = "torch.distributed.fsdp.fake"


def recorded(state: dict[str, Any]) -> StateAtStep:
    found = StateAtStep(state)
    found.record(arriving=False)
    return found


def test_a_written_or_replaced_tensor_is_named_and_fsdps_are_not_looked_at() -> None:
    state = {"sharded": Sharded(2, 2), "model": torch.nn.Linear(2, 2), "x": torch.zeros(2), "n": 5}
    found = recorded(state)
    assert found.changed() is None
    with torch.no_grad():
        state["sharded"].weight.add_(1)
    assert found.changed() is None
    with torch.no_grad():
        state["model"].bias.add_(1)
    assert found.changed() == "model.bias"
    found.record(arriving=False)
    assert found.changed() is None
    state["x"] = torch.zeros(2)
    assert found.changed() == "x"
    found.record(arriving=True)
    state["x"] = torch.zeros(2)
    assert found.changed() is None, "a lazy restore writes, too"


def test_tensors_without_a_version_are_not_compared() -> None:
    with torch.inference_mode():
        state = {"x": torch.zeros(2), "y": torch.zeros(2)}
    found = recorded(state)
    state["y"] = torch.ones(2)
    assert found.changed() is None


def test_the_reason_why_the_last_step_is_not_saved() -> None:
    state = {"x": torch.zeros(2)}
    unsaved = Unsaved(state)
    group: Any = object()
    unsaved.stepped(3, arriving=False)
    assert unsaved._why_not(None) is unsaved._why_not(group) is None
    unsaved.failed = "ValueError"
    assert unsaved._why_not(None) is None
    assert unsaved._why_not(group) == "an exception ends this rank, and the others may have continued"
    state["x"].add_(1)
    assert unsaved._why_not(group) == ("x was written to since; call ckpt.save(3) before the state is changed")
    unsaved.optimizer_steps()
    assert unsaved._why_not(group) == "an optimizer has stepped since"
    unsaved.stepped(4, arriving=False)
    unsaved.failed = ""
    assert unsaved._why_not(group) is None


def test_the_memory_that_is_available_is_asked_of_the_system_where_the_kernel_does_not_tell(monkeypatch: Any) -> None:
    def refuse(*_: object, **__: object) -> Any:
        raise OSError("no /proc")

    told = prefault._available_bytes()
    monkeypatch.setattr(prefault, "open", refuse, raising=False)
    monkeypatch.setattr(prefault.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_AVPHYS_PAGES": 1000}.__getitem__)
    assert prefault._available_bytes() == 4_096_000
    assert told > 2**20
