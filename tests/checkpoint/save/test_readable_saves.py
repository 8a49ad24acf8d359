"""What is saved can be restored: state that no restore could read is refused in the constructor, or its save fails."""

from __future__ import annotations

import os
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from deepvm.checkpoint import Checkpointer
from deepvm.errors import CheckpointError, Corrupt, UsageError
from deepvm.store.files.store import FileStore
from deepvm.store.state_check import MOST_SAVED_DEPTH, check_header
from deepvm.store.verify import verify

PATIENCE_S = 30


class Component:
    """Something with a state of its own, which a restore replaces."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["state"]


def there_and_back(tmp_path: Path, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Save one state, verify it, and restore it into another."""
    with Checkpointer(before, str(tmp_path), run="r", policy="every 1000 steps") as ckpt:
        ckpt.save(1).wait("durable", PATIENCE_S)
        ckpt.save(2).wait("durable", PATIENCE_S)  # of what was captured before
    store = FileStore(tmp_path)
    assert verify(store, "r", 2).good
    with Checkpointer(after, str(tmp_path), run="r", policy="every 1000 steps") as ckpt:
        assert ckpt.restore() == 2
    return after


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


NO_TEXT = os.fsdecode(b"caf\xe9.txt")  # a file's name that is not UTF-8


@pytest.mark.parametrize(
    "value", [NO_TEXT, {NO_TEXT: 1}, {NO_TEXT: {"$a": NO_TEXT}}, [NO_TEXT], {"é": "é"}, "\ud83d\ude00", "\udc00" * 3]
)
def test_text_that_is_not_valid_comes_back(tmp_path: Path, value: Any) -> None:
    found = there_and_back(tmp_path, {"x": value, "c": Component(value)}, {"x": None, "c": Component()})
    assert found["x"] == value
    assert found["c"].state == value


def test_tensors_under_any_name_come_back(tmp_path: Path) -> None:
    def state(add: float) -> dict[str, Any]:
        return {
            "__metadata__": torch.ones(3) + add,
            "__metadata__'": torch.ones(2) + add,
            "$tensor": {"a": torch.ones(5) + add},
            "x": {NO_TEXT: torch.ones(4) + add, "$b": torch.ones(1) + add},
        }

    found = there_and_back(tmp_path, state(1.0), state(0.0))
    assert repr(found) == repr(state(1.0))
    (path,) = (tmp_path / "r").rglob("*2*.safetensors")
    with safe_open(path, framework="pt") as file:  # as any reader opens it
        assert len(file.keys()) == 5


class Named(torch.nn.Module):
    """Its parameters have the names of a skeleton's tags."""

    def __init__(self, value: float, *, plain: bool = False) -> None:
        super().__init__()
        for name in ("$tensor", "$module", "$items", "weight"):
            self.register_parameter(name, torch.nn.Parameter(torch.full((3,), value)))
        self.inner = torch.nn.Linear(2, 2)
        self._plain = plain

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        found = super().state_dict(*args, **kwargs)
        return OrderedDict(found.items()) if self._plain else found  # without the versions


@pytest.mark.parametrize("plain", [False, True])
def test_parameters_whose_names_begin_with_a_dollar_come_back(tmp_path: Path, plain: bool) -> None:
    before = Named(7.0, plain=plain)
    optimizer = torch.optim.AdamW(before.parameters())
    found = there_and_back(tmp_path, {"m": before, "o": optimizer}, {"m": Named(0.0, plain=plain)})["m"]
    assert all(torch.equal(a, b) for a, b in zip(before.parameters(), found.parameters(), strict=True))


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ({NO_TEXT: 1}, "not valid text"),
        ({"x": nested(MOST_SAVED_DEPTH + 1)}, f"'x' could not be restored: .* more than {MOST_SAVED_DEPTH} deep"),
        ({"x": nested(5000)}, "'x' is nested too deep"),
        ({"x": 10**5000}, "'x' could not be restored: Exceeds the limit"),
        ({"x": torch.empty(8, dtype=torch.uint4)}, r"x is a tensor of type torch.uint4 .*: save its view as"),
    ],
)
def test_what_could_not_be_restored_is_refused_at_once(tmp_path: Path, state: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Checkpointer(state, str(tmp_path), run="r")


def test_what_is_as_deep_as_allowed_comes_back(tmp_path: Path) -> None:
    deepest = nested(MOST_SAVED_DEPTH)
    found = there_and_back(tmp_path, {"x": deepest, "y": 1}, {"x": nested(MOST_SAVED_DEPTH), "y": 0})
    assert found == {"x": deepest, "y": 1}


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (nested(MOST_SAVED_DEPTH + 1), "'c' could not be restored: it is nested more than"),
        ([0] * 8_000_001, "'c' could not be restored: it has about 8000002 values"),
        (torch.empty(8, dtype=torch.uint4), r"c.state is a tensor of type torch.uint4"),
    ],
)
def test_a_save_that_could_not_be_restored_fails_and_names_what_is_wrong(
    tmp_path: Path, value: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer({"c": Component(value)}, str(tmp_path), run="r", policy="every 1000 steps") as ckpt:
        handle = ckpt.save(1)
        with pytest.raises(CheckpointError, match=why):
            handle.wait("remote", PATIENCE_S)
        assert "could not be restored" in caplog.text or "uint4" in caplog.text
        ckpt.close(last_save=False)
    assert FileStore(tmp_path).steps("r") == []


def test_a_value_that_grows_too_deep_fails_its_own_save_only(tmp_path: Path) -> None:
    component = Component(1)
    with Checkpointer({"c": component}, str(tmp_path), run="r", policy="every 1000 steps") as ckpt:
        ckpt.save(1).wait("durable", PATIENCE_S)
        component.state = nested(MOST_SAVED_DEPTH + 1)
        with pytest.raises(CheckpointError, match="'c' could not be restored"):
            ckpt.save(2).wait("durable", PATIENCE_S)
        component.state = 3
        ckpt.save(3).wait("durable", PATIENCE_S)
    assert FileStore(tmp_path).steps("r") == [1, 3]


def test_a_header_is_checked_as_its_readers_do() -> None:
    text = b'{"__metadata__":{"format":"deepvm-state/1","skeleton":"[{\\"x\\": {\\"$later\\": 1}}]"}}'
    with pytest.raises(Corrupt, match="later"):
        check_header(len(text).to_bytes(8, "little") + text, 8 + len(text))


# --- types ------------------------------------------------------------------------------------------------------------

TYPED = [
    Counter({2: 1, 4: 3}),
    Counter("abca"),
    OrderedDict([("b", 1), ("a", OrderedDict())]),
    OrderedDict([("$b", 1), (3, [Counter()])]),
    defaultdict(int, a=1),
    defaultdict(list, {1: [2]}),
    defaultdict(None, a=1),
    defaultdict(Counter, a=Counter("a")),
]


@pytest.mark.parametrize("value", TYPED, ids=repr)
def test_types_of_dicts_come_back(tmp_path: Path, value: Any) -> None:
    found = there_and_back(tmp_path, {"c": Component(value)}, {"c": Component()})["c"].state
    assert repr(found) == repr(value)
    if isinstance(value, defaultdict):
        assert found.default_factory is value.default_factory


def test_a_schedule_whose_milestones_are_counted_continues_after_its_warm_up(tmp_path: Path) -> None:
    schedules = torch.optim.lr_scheduler

    def made() -> tuple[torch.optim.SGD, schedules.SequentialLR]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)
        parts = [schedules.LinearLR(optimizer, 0.1, total_iters=3), schedules.MultiStepLR(optimizer, [2, 4], 0.1)]
        return optimizer, schedules.SequentialLR(optimizer, parts, milestones=[3])

    def rates(optimizer: torch.optim.SGD, schedule: schedules.SequentialLR, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            optimizer.step()
            schedule.step()
            found.append(float(optimizer.param_groups[0]["lr"]))
        return found

    optimizer, schedule = made()
    rates(optimizer, schedule, 2)
    other, restored = made()
    there_and_back(tmp_path, {"o": optimizer, "s": schedule}, {"o": other, "s": restored})
    assert rates(other, restored, 8) == rates(optimizer, schedule, 8)


# --- modules that load their own state --------------------------------------------------------------------------------


class WithExtraState(torch.nn.Module):
    def __init__(self, values: list[float]) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.values = values

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(self.values)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.values = state.tolist()


class Resizing(torch.nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("seen", torch.arange(float(size)))

    def _load_from_state_dict(self, state: dict[str, torch.Tensor], prefix: str, *rest: Any) -> None:
        self.seen.resize_(state[f"{prefix}seen"].shape)
        super()._load_from_state_dict(state, prefix, *rest)


@pytest.mark.parametrize("before", [[5.0, 6.0], [5.0, 6.0, 7.0]])
def test_extra_state_that_is_a_tensor_is_given_to_the_module(tmp_path: Path, before: list[float]) -> None:
    found = there_and_back(tmp_path, {"m": WithExtraState(before)}, {"m": WithExtraState([0.0, 0.0])})["m"]
    assert found.values == before


def test_a_module_that_resizes_its_own_buffers_may(tmp_path: Path) -> None:
    found = there_and_back(tmp_path, {"m": torch.nn.Sequential(Resizing(5))}, {"m": torch.nn.Sequential(Resizing(2))})
    assert found["m"][0].seen.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
