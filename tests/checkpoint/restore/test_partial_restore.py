"""A part of a checkpoint: what is left out, missing or unexpected is told, and stays as it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deepvm.checkpoint import Checkpointer
from deepvm.checkpoint.restore.newest import Restored
from deepvm.errors import CheckpointError, UsageError
from deepvm.memnode import MemoryNode

WAIT_S = 20.0


class Net(torch.nn.Module):
    def __init__(self, seed: int, classes: int = 3, **parts: torch.nn.Module) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, classes)
        for name, part in parts.items():
            self.add_module(name, part)


def made(seed: int, classes: int = 3, **parts: torch.nn.Module) -> dict[str, Any]:
    model = Net(seed, classes, **parts)
    optimizer = torch.optim.Adam(model.parameters(), lr=seed / 10)
    model.head(model.body(torch.ones(1, 4))).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "epoch": seed}


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}"
        return
    with MemoryNode(listen="127.0.0.1:0", capacity_bytes=2**24, block_bytes=2**16) as node:
        yield f"memory://{node.address}"


@pytest.fixture(params=[False, True], ids=["eager", "lazy"])
def lazy(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def save(url: str, state: dict[str, Any]) -> None:
    with Checkpointer(state, url, on_error="raise") as ckpt:
        ckpt.save(1).wait("remote", WAIT_S)


def restore(url: str, state: dict[str, Any], **options: Any) -> Restored:
    with Checkpointer(state, url) as ckpt:
        assert ckpt.restore(**options) == 1
        ckpt.finish_restore()
        assert ckpt.restored is not None
        return ckpt.restored


def copy_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def has(module: torch.nn.Module, state: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())


def test_a_component_that_is_left_out_stays_as_it_was(url: str, lazy: bool) -> None:
    saved, live = made(1), made(2)
    save(url, saved)
    found = restore(url, live, lazy=lazy, exclude=("optimizer",))
    assert has(live["model"], saved["model"].state_dict())
    assert live["epoch"] == 1
    assert live["optimizer"].param_groups[0]["lr"] == 0.2
    assert found.skipped == ("optimizer",)
    assert any("optimizer" in reason for reason in found.drift)


def test_tensors_that_are_left_out_stay_as_they_were(url: str, lazy: bool) -> None:
    saved, live = made(1, classes=5), made(2, classes=3)
    save(url, saved)
    head = copy_of(live["model"].head)
    found = restore(url, live, lazy=lazy, exclude=("model.head", "optimizer"))
    assert has(live["model"].body, saved["model"].body.state_dict())
    assert has(live["model"].head, head)
    assert set(found.skipped) == {"model.head.weight", "model.head.bias", "optimizer"}
    assert (found.missing, found.unexpected) == ((), ())


def test_only_what_is_asked_for_is_restored(url: str, lazy: bool) -> None:
    saved, live = made(1), made(2)
    save(url, saved)
    head = copy_of(live["model"].head)
    found = restore(url, live, lazy=lazy, only=("model.body",))
    assert has(live["model"].body, saved["model"].body.state_dict())
    assert has(live["model"].head, head)
    assert live["epoch"] == 2
    assert set(found.skipped) == {"model.head.weight", "model.head.bias", "optimizer", "epoch"}


class Versioned(torch.nn.Linear):
    """Has a version of its own, as BatchNorm has, and loads itself."""

    _version = 7
    found: Any = None

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        self.found = local_metadata.get("version")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)  # type: ignore[misc]


def test_a_part_that_is_restored_learns_the_version_that_it_was_saved_with(url: str, lazy: bool) -> None:
    saved, state = made(1, extra=Versioned(2, 2)), made(2, extra=Versioned(2, 2))
    save(url, saved)
    head = copy_of(state["model"].head)
    restore(url, state, exclude=("model.head",), lazy=lazy)
    assert state["model"].extra.found == 7
    assert has(state["model"].extra, copy_of(saved["model"].extra))
    assert has(state["model"].body, copy_of(saved["model"].body))
    assert has(state["model"].head, head)


def test_a_tensor_is_restored_into_one_of_another_type(url: str, lazy: bool) -> None:
    save(url, {"x": torch.tensor([1.5, 2.5, 3.5])})
    state = {"x": torch.zeros(3, dtype=torch.float64)}
    before = state["x"]
    restore(url, state, lazy=lazy)
    assert state["x"] is before
    assert before.tolist() == [1.5, 2.5, 3.5]


def test_without_strict_what_both_have_is_restored_and_the_rest_is_reported(url: str, lazy: bool) -> None:
    saved, live = made(1, old=torch.nn.Linear(1, 1)), made(2, new=torch.nn.Linear(1, 1))
    save(url, saved)
    live["extra"] = 7
    new = copy_of(live["model"].new)
    with pytest.raises(CheckpointError, match=r"no state of extra.*strict=False"):
        restore(url, live, lazy=lazy)
    assert not has(live["model"].body, saved["model"].body.state_dict())
    found = restore(url, live, lazy=lazy, strict=False)
    assert has(live["model"].body, saved["model"].body.state_dict())
    assert has(live["model"].new, new)
    assert live["extra"] == 7
    assert set(found.missing) == {"extra", "model.new.weight", "model.new.bias"}
    assert set(found.unexpected) == {"model.old.weight", "model.old.bias"}
    assert any("model.new.weight" in reason for reason in found.drift)


def test_strict_names_what_differs_and_changes_nothing(tmp_path: Path, lazy: bool) -> None:
    url = f"file://{tmp_path}"
    many = {f"part{i}": torch.nn.Linear(1, 1) for i in range(20)}
    save(url, made(1))
    live = made(2, **many)
    before = copy_of(live["model"])
    with pytest.raises(CheckpointError, match=r"model\.part0\.weight is not in the checkpoint.*and 32 more") as error:
        restore(url, live, lazy=lazy)
    assert len(str(error.value)) < 1000
    assert has(live["model"], before)
    assert live["epoch"] == 2


def test_another_shape_is_reported_with_or_without_strict(tmp_path: Path) -> None:
    url = f"file://{tmp_path}"
    save(url, made(1, classes=5))
    for strict in (True, False):
        with pytest.raises(CheckpointError, match=r"model\.head\.weight is \(3, 4\), saved \(5, 4\)"):
            restore(url, made(2, classes=3), strict=strict)


def test_an_optimizer_of_other_groups_is_reported_with_the_way_out(tmp_path: Path) -> None:
    url = f"file://{tmp_path}"
    save(url, made(1))
    live = made(2, new=torch.nn.Linear(1, 1))
    with pytest.raises(CheckpointError, match=r"another optimizer.*exclude=\(\"optimizer\",\)"):
        restore(url, live, strict=False)
    restore(url, live, strict=False, exclude=("optimizer",))


@pytest.mark.parametrize("options", [{"exclude": ("modle",)}, {"only": ("optimizer.state",)}, {"exclude": "optimizer"}])
def test_names_that_nothing_has_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    url = f"file://{tmp_path}"
    save(url, made(1))
    live = made(2)
    before = copy_of(live["model"])
    with pytest.raises(UsageError, match=r"exclude|only"):
        restore(url, live, **options)
    assert has(live["model"], before)


def test_what_the_checkpoint_has_beyond_the_state_is_reported(url: str) -> None:
    save(url, made(1))
    found = restore(url, {"model": Net(2)})
    assert set(found.unexpected) == {"optimizer", "epoch"}


def test_training_continues_after_a_partial_restore_and_saves_all_of_it(url: str, lazy: bool) -> None:
    saved, live, again = made(1), made(2), made(3)
    save(url, saved)
    with Checkpointer(live, url, on_error="raise") as ckpt:
        assert ckpt.restore(lazy=lazy, exclude=("model.head",)) == 1
        live["model"].head(live["model"].body(torch.ones(1, 4))).sum().backward()
        live["optimizer"].step()
        ckpt.save(2).wait("remote", WAIT_S)
    with Checkpointer(again, url) as ckpt:
        assert ckpt.restore() == 2
    assert has(again["model"], live["model"].state_dict())
