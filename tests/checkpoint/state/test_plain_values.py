"""Plain values in the caller's own mapping: read at each save, written by restore."""

from __future__ import annotations

import copy
import enum
from collections import namedtuple
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from deepvm.checkpoint import Checkpointer
from deepvm.errors import CheckpointError, UsageError

WAIT_S = 20.0


class Color(enum.Enum):
    RED = "r"
    BLUE = "b"


def save(path: Path, state: Any, step: int = 1) -> None:
    with Checkpointer(state, f"file://{path}", on_error="raise") as ckpt:
        ckpt.save(step).wait("remote", WAIT_S)


def restore(path: Path, state: Any, *, lazy: bool = False) -> Any:
    with Checkpointer(state, f"file://{path}") as ckpt:
        assert ckpt.restore(lazy=lazy) is not None
        ckpt.finish_restore()
    return state


@pytest.mark.parametrize("lazy", [False, True])
def test_the_callers_mapping_is_saved_as_it_is_and_holds_what_is_restored(tmp_path: Path, lazy: bool) -> None:
    state: dict[str, Any] = {"best": 1e9, "history": [1], "model": torch.nn.Linear(2, 2)}
    with Checkpointer(state, f"file://{tmp_path}", on_error="raise") as ckpt:
        state["best"] = 0.5
        state["history"].append(2)
        ckpt.save(1).wait("remote", WAIT_S)
    history: list[int] = []
    again = {"best": 1e9, "history": history, "model": torch.nn.Linear(2, 2)}
    restore(tmp_path, again, lazy=lazy)
    assert again["best"] == 0.5
    assert history == [1, 2]
    assert again["history"] is history


def test_a_value_set_after_a_restore_is_saved(tmp_path: Path) -> None:
    save(tmp_path, {"best": 3.0})
    state: dict[str, Any] = {"best": 1e9}
    with Checkpointer(state, f"file://{tmp_path}", on_error="raise") as ckpt:
        ckpt.restore()
        state["best"] -= 1
        ckpt.save(2).wait("remote", WAIT_S)
    assert restore(tmp_path, {"best": None}) == {"best": 2.0}


def test_containers_tensors_and_arrays_keep_their_identity_at_any_depth(tmp_path: Path) -> None:
    save(
        tmp_path,
        {"part": {"deep": [{"t": torch.arange(3.0)}], "a": np.arange(3), "seen": {1, 2}, "raw": bytearray(b"ab")}},
    )
    tensor, array, seen, raw = torch.zeros(3), np.zeros(3, dtype=np.int64), {9}, bytearray()
    inner = {"t": tensor, "gone": 1}
    outer = {"deep": [inner, 5], "a": array, "seen": seen, "raw": raw}
    state = restore(tmp_path, {"part": outer})
    assert state["part"] is outer
    assert outer["deep"] == [inner]
    assert inner == {"t": tensor}
    assert tensor.tolist() == [0.0, 1.0, 2.0]
    assert array.tolist() == [0, 1, 2]
    assert (seen, raw) == ({1, 2}, b"ab")


def test_one_object_in_two_places_is_given_what_each_of_them_had(tmp_path: Path) -> None:
    save(tmp_path, {"rows": [[1, 2], [3, 4], [3, 4]], "pair": [torch.ones(2), torch.zeros(2)]})
    row, tensor = [0, 0], torch.full((2,), 7.0)
    state = restore(tmp_path, {"rows": [row] * 3, "pair": [tensor] * 2})
    assert state["rows"] == [[1, 2], [3, 4], [3, 4]]
    assert [t.tolist() for t in state["pair"]] == [[1, 1], [0, 0]]
    save(tmp_path, {"rows": [[5, 6]] * 2, "pair": [torch.ones(2)] * 2}, step=2)
    state = restore(tmp_path, {"rows": [row] * 2, "pair": [tensor] * 2})
    assert state["rows"][0] is state["rows"][1] is row  # given the same twice, it stays one
    assert state["pair"][0] is state["pair"][1] is tensor
    assert row == [5, 6]


@pytest.mark.parametrize(
    ("held", "saved"),
    [
        ([], [5, 5]),
        ([], [None, None]),
        (torch.zeros(2), [torch.ones(4), torch.ones(4)]),
        (np.zeros(2), [np.ones(2), np.full(2, 2.0)]),
        ([1.0], [[float("nan")], [float("nan")]]),
        ([Color.RED], [[Color.BLUE], [Color.RED]]),
        (bytearray(b"old"), [bytearray(b"one"), bytearray(b"two")]),
        ({"a": 1}, [{"a": 2}, {"b": 3}]),
    ],
)
def test_one_object_in_two_places_is_given_what_each_had_whatever_it_is(tmp_path: Path, held: Any, saved: Any) -> None:
    save(tmp_path, {"value": copy.deepcopy(saved)})
    found = restore(tmp_path, {"value": [held, held]})["value"]
    assert str(found) == str(saved)
    assert [type(one) for one in found] == [type(one) for one in saved]


def test_what_cannot_be_filled_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, {"part": {"other shape": torch.ones(4), "other type": torch.ones(2), "expanded": torch.ones(3)}})
    expanded = torch.zeros(1).expand(3)
    live = {"other shape": torch.zeros(2), "other type": torch.zeros(2, dtype=torch.int64), "expanded": expanded}
    part = restore(tmp_path, {"part": live})["part"]
    assert part["other shape"].tolist() == [1.0] * 4
    assert part["other type"].dtype is torch.float32
    assert part["expanded"].tolist() == [1.0] * 3
    assert expanded.tolist() == [0.0] * 3


class Phase(enum.Enum):
    WARM = "warm"
    COLD = "cold"


def test_members_of_enumerations_and_named_tuples_come_back_as_what_they_are_here(tmp_path: Path) -> None:
    point = namedtuple("point", "x y")
    save(tmp_path, {"part": {"phase": Phase.COLD, "point": point(1, 2)}, "phase": Phase.COLD})
    state = restore(tmp_path, {"part": {"phase": Phase.WARM, "point": point(0, 0)}, "phase": Phase.WARM})
    assert state == {"part": {"phase": Phase.COLD, "point": point(1, 2)}, "phase": Phase.COLD}
    assert isinstance(state["part"]["point"], point)


def test_a_tensor_of_another_shape_is_reported_before_anything_is_changed(tmp_path: Path) -> None:
    save(tmp_path, {"n": 5, "mean": torch.ones(3)})
    state = {"n": 0, "mean": torch.zeros(4)}
    with (
        Checkpointer(state, f"file://{tmp_path}") as ckpt,
        pytest.raises(CheckpointError, match=r"mean is \(4,\), saved \(3,\)"),
    ):
        ckpt.restore()
    assert state["n"] == 0


def test_what_is_added_later_is_saved_from_then_on(tmp_path: Path) -> None:
    state: dict[str, Any] = {"a": 1}
    with Checkpointer(state, f"file://{tmp_path}", on_error="raise") as ckpt:
        ckpt.save(1).wait("remote", WAIT_S)
        state["b"] = [2]
        ckpt.save(2).wait("remote", WAIT_S)
    assert restore(tmp_path, {"a": 0, "b": []}) == {"a": 1, "b": [2]}
    again = {"a": 0}
    with Checkpointer(again, f"file://{tmp_path}") as ckpt:
        assert ckpt.restore() == 2
        assert ckpt.restored is not None
        assert ckpt.restored.unexpected == ("b",)
    assert again == {"a": 1}


def test_an_optimizer_that_is_added_later_waits_for_saves_as_others_do(tmp_path: Path) -> None:
    model = torch.nn.Linear(300, 300)
    state: dict[str, Any] = {"model": model}
    with Checkpointer(state, f"file://{tmp_path}", on_error="raise") as ckpt:
        state["optimizer"] = optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for step in range(1, 6):
            truth = model.weight.detach().clone()
            handle = ckpt.save(step)
            model(torch.ones(1, 300)).sum().backward()
            optimizer.step()
            handle.wait("remote", WAIT_S)
            again = torch.nn.Linear(300, 300)
            restore(tmp_path, {"model": again})
            assert torch.equal(again.weight, truth)


def test_a_name_of_ours_that_is_added_later_is_refused(tmp_path: Path) -> None:
    state: dict[str, Any] = {"a": 1}
    with Checkpointer(state, f"file://{tmp_path}") as ckpt:
        state["deepvm.determinism"] = 2
        with pytest.raises(CheckpointError, match="are reserved"):
            ckpt.save(1).wait("remote", WAIT_S)
        del state["deepvm.determinism"]


def test_a_mapping_that_cannot_be_written_is_refused_where_restore_would_have_to(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"best.*pass a dict"):
        Checkpointer(MappingProxyType({"best": 1.0}), f"file://{tmp_path}")
    history = [1]
    save(tmp_path, MappingProxyType({"model": torch.nn.Linear(2, 2), "history": history}))
    history.clear()
    restore(tmp_path, MappingProxyType({"model": torch.nn.Linear(2, 2), "history": history}))
    assert history == [1]
