"""A restore that a model refuses changes nothing else; and neither restore() nor save() depends on torch's modes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from deepvm.checkpoint import Checkpointer
from deepvm.errors import CheckpointError

NEVER = "every 1000000 steps"


class Refusing(torch.nn.Linear):
    """A model with a check of its own, as of a vocabulary."""

    refuses = False

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        if self.refuses:
            raise ValueError("the vocabulary is another")
        return super().load_state_dict(state_dict, *args, **kwargs)


class Training:
    def __init__(self, value: float) -> None:
        self.plain_model = torch.nn.Linear(256, 256)
        self.model = Refusing(2, 2)
        self.optimizer = torch.optim.SGD(self.plain_model.parameters(), lr=value, momentum=0.9)
        self.average = torch.full((5,), value)
        self.empty = torch.empty(0)
        self.best = {"loss": value, "history": [value], "weights": torch.full((3,), value)}
        torch.nn.init.constant_(self.plain_model.weight, value)

    @property
    def state(self) -> dict[str, Any]:
        names = ("average", "best", "plain_model", "optimizer", "model", "empty")
        return {name: getattr(self, name) for name in names}

    def step(self) -> None:
        self.plain_model(torch.ones(1, 256)).sum().backward()
        self.optimizer.step()


@pytest.fixture
def store(tmp_path: Path) -> str:
    work = Training(1.0)
    work.step()
    with Checkpointer(work.state, store=f"file://{tmp_path}", policy=NEVER) as ckpt:
        ckpt.save(1).wait("remote")
    return f"file://{tmp_path}"


@pytest.mark.parametrize("lazy", [False, True])
def test_what_a_model_refuses_changes_nothing_else(store: str, lazy: bool) -> None:
    work = Training(2.0)
    work.model.refuses = True
    with Checkpointer(work.state, store=store, policy=NEVER) as ckpt:
        with pytest.raises(CheckpointError, match="vocabulary"):
            ckpt.restore(lazy=lazy)
        ckpt.close(last_save=False)
    assert work.best["loss"] == 2.0
    assert work.best["history"] == [2.0]
    assert torch.equal(work.best["weights"], torch.full((3,), 2.0))
    assert torch.equal(work.average, torch.full((5,), 2.0))
    assert torch.equal(work.plain_model.weight, torch.full((256, 256), 2.0))
    assert work.optimizer.param_groups[0]["lr"] == 2.0


MODES = {"inference": torch.inference_mode, "meta": lambda: torch.device("meta")}


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_restore_within_a_mode_can_be_trained(store: str, mode: str, lazy: bool) -> None:
    work = Training(2.0)
    with Checkpointer(work.state, store=store, policy=NEVER) as ckpt:
        with enter(mode):
            assert ckpt.restore(lazy=lazy) == 1
            if mode == "inference":
                work.plain_model(torch.ones(1, 256))  # the first use of a parameter
        work.step()
        work.average += 1
        work.best["weights"] += 1
        ckpt.close(last_save=False)
    tensors = [*work.plain_model.parameters(), *work.model.parameters(), work.average, work.empty, work.best["weights"]]
    tensors += [kept["momentum_buffer"] for kept in work.optimizer.state.values()]
    assert {tensor.device.type for tensor in tensors} == {"cpu"}
    assert not any(tensor.is_inference() for tensor in tensors)


@pytest.mark.parametrize("mode", MODES)
def test_a_save_within_a_mode_is_the_state_and_later_ones_are(tmp_path: Path, mode: str) -> None:
    work = Training(1.0)
    with Checkpointer(work.state, store=f"file://{tmp_path}", policy=NEVER, on_error="raise") as ckpt:
        with enter(mode):
            ckpt.save(1).wait("remote")
        work.step()
        ckpt.save(2).wait("remote")
    again = Training(2.0)
    with Checkpointer(again.state, store=f"file://{tmp_path}", policy=NEVER) as ckpt:
        assert ckpt.restore(1) == 1
        assert torch.equal(again.plain_model.weight, torch.full((256, 256), 1.0))
        assert ckpt.restore(2) == 2
        assert torch.equal(again.plain_model.weight, work.plain_model.weight)
        assert torch.equal(again.average, work.average)


def enter(mode: str) -> AbstractContextManager[Any]:
    return MODES[mode]()  # type: ignore[no-any-return, no-untyped-call]
