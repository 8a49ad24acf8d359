"""Restored values put into what the caller holds: what is filled in place, what is replaced, and what is refused."""

from __future__ import annotations

import collections
import enum
from typing import Any

import numpy as np
import pytest
import torch

from deepvm.checkpoint.state.fill import check_puttable, fill, put, wrapper_problem
from deepvm.checkpoint.state.skeleton import Tensors, flatten
from tests.checkpoint.state.test_tensor_kinds import TwoTensor


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("live", "saved"),
    [
        ([1, [2], {"a": 3}], [4, [5], {"a": 6}]),
        ([1], [4, 5, 6]),
        ([1, 2, 3], [4]),
        ({"a": 1, "b": [2]}, {"b": [3], "c": 4}),
        (collections.OrderedDict(a=1), {"a": 2}),
        ({1, 2}, {2, 3}),
        (bytearray(b"ab"), b"xyz"),
        (np.zeros(3), np.ones(3)),
        (torch.zeros(2, 2), torch.ones(2, 2)),
    ],
)
def test_a_container_stays_and_has_what_was_saved(live: Any, saved: Any) -> None:
    assert put(live, saved) is live
    same = live == saved
    assert bool(same.all()) if hasattr(same, "all") else same


def test_inner_containers_stay_too() -> None:
    inner, array = [2], np.zeros(2)
    live = {"a": [inner, array], "t": (inner,)}
    put(live, {"a": [[5, 6], np.ones(2)], "t": ([5, 6],)})
    assert live["a"][0] is inner is live["t"][0]
    assert inner == [5, 6]
    assert live["a"][1] is array
    assert array.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("live", "saved"),
    [
        (5, 6),
        ("a", 5),
        (None, [1]),
        ([1], {"a": 1}),
        ({"a": 1}, [1]),
        ({1}, [1]),
        (bytearray(b"a"), "a"),
        (b"a", b"b"),
        (np.zeros(3), np.ones(4)),
        (np.zeros(3), np.ones(3, dtype=np.float32)),
        (np.zeros(3), 5),
        (torch.zeros(2), torch.ones(3)),
        (torch.zeros(2), torch.ones(2, dtype=torch.int64)),
        (torch.zeros(2), 5),
    ],
)
def test_what_cannot_be_filled_is_replaced(live: Any, saved: Any) -> None:
    assert put(live, saved) is saved


def test_an_array_that_may_not_be_written_and_a_tensor_that_shares_memory_are_replaced() -> None:
    array = np.zeros(3)
    array.flags.writeable = False
    assert put(array, ones := np.ones(3)) is ones
    expanded = torch.zeros(1).expand(3)
    assert put(expanded, saved := torch.ones(3)) is saved
    assert not fill(torch.empty(3, device="meta"), torch.ones(3))


def test_tuples_are_kept_where_nothing_changes_and_made_again_where_something_does() -> None:
    inner = [1]
    live = (inner, 5)
    assert put(live, ([2], 5)) is live
    assert inner == [2]
    assert put((1, 2), (1, 3)) == (1, 3)
    assert put((1, 2), (1, 2, 3)) == (1, 2, 3)
    named = put(Point(1, 2), (1, 3))
    assert (named, type(named)) == (Point(1, 3), Point)
    assert type(put(Point(1, 2), (1, 2, 3))) is tuple
    assert put((1,), [1]) == [1]


def test_members_of_enumerations_come_back_as_members() -> None:
    assert put(Colour.RED, 2) is Colour.BLUE
    assert put(Colour.RED, Colour.BLUE) is Colour.BLUE
    assert put({"c": [Colour.RED]}, {"c": [2]}) == {"c": [Colour.BLUE]}
    for live, saved in ((Colour.RED, 3), ({"c": [Colour.RED]}, {"c": [3]}), ((Colour.RED,), (3,))):
        with pytest.raises(ValueError, match="3"):
            check_puttable(live, saved)
    check_puttable({"c": (Colour.RED, 1)}, {"c": (2, 1), "d": 5})
    check_puttable([Colour.RED], {"a": 3})


@pytest.mark.parametrize(
    ("one", "first", "second"),
    [
        ([0], [1], [2]),
        ({"a": 0}, {"a": 1}, {"a": 2}),
        (np.zeros(2), np.ones(2), np.array([3.0, np.nan])),
        (torch.zeros(2), torch.ones(2), torch.full((2,), 3.0)),
        (bytearray(b"a"), b"b", b"c"),
    ],
)
def test_one_object_in_two_places_stays_one_only_with_one_value(one: Any, first: Any, second: Any) -> None:
    live = [one, one]
    put(live, [first, first])
    assert live[0] is live[1] is one
    put(live, [first, second])
    assert live[0] is one
    assert live[1] is not one
    assert str(live[0]) != str(live[1])


@pytest.mark.parametrize(
    ("value", "other", "same"),
    [
        (float("nan"), float("nan"), True),
        (1, 1.0, False),
        ({"a": 1}, {"b": 1}, False),
        ([1, 2], [1], False),
        ((1, 2), (1, 2), True),
        (torch.ones(2), torch.ones(2), True),
        (torch.ones(2), torch.ones(2, dtype=torch.int64), False),
        (np.ones(2), np.ones((2, 1)), False),
        ({"a": [np.ones(2)]}, {"a": [np.ones(2)]}, True),
        ({"a": [np.ones(2)]}, {"a": [np.zeros(2)]}, False),
    ],
)
def test_values_of_one_object_are_compared_down_to_their_arrays(value: Any, other: Any, same: bool) -> None:
    held: list[Any] = ["x"]
    live = [held, held]
    put(live, [[value], [other]])
    assert (live[0] is live[1]) == same


def test_an_object_that_contains_itself_is_filled() -> None:
    live: list[Any] = [1]
    live.append(live)
    saved: list[Any] = [2, [3]]
    put(live, saved)
    assert live[0] == 2


def test_wrappers_are_filled_by_the_tensors_that_they_hold() -> None:
    live, saved = TwoTensor(torch.zeros(3), torch.zeros(3)), TwoTensor(torch.ones(3), torch.full((3,), 2.0))
    inner = live.a
    assert fill(live, saved)
    assert live.a is inner
    assert (live.a.tolist(), live.b.tolist()) == ([1.0] * 3, [2.0] * 3)
    assert not fill(live, torch.ones(3))
    assert not fill(torch.ones(3), live)
    deep = TwoTensor(TwoTensor(torch.zeros(3), torch.zeros(3)), torch.zeros(3))
    assert not fill(deep, saved)


def row_of(tensor: torch.Tensor) -> tuple[Any, Tensors]:
    tensors = Tensors()
    return flatten(tensor, "w", tensors), tensors


def test_why_a_wrapper_cannot_take_what_was_saved() -> None:
    live = TwoTensor(torch.zeros(3), torch.zeros(3))
    row, tensors = row_of(TwoTensor(torch.ones(3), torch.ones(3)))
    assert wrapper_problem("m.w", live, row, tensors) is None
    assert wrapper_problem("m.w", torch.ones(3), {"$tensor": "w"}, tensors) is None
    problem = wrapper_problem("m.w", torch.ones(3), row, tensors)
    assert problem is not None
    assert problem.startswith("m.w is a plain tensor, saved ")
    plain = wrapper_problem("m.w", live, {"$tensor": "w"}, tensors)
    assert plain is not None
    assert plain.endswith("saved a plain tensor")
    other = wrapper_problem("m.w", live, {**row, "inner": {"a": row["inner"]["a"]}}, tensors)
    assert other == "m.w holds a, b, saved a"
    shorter, shorter_tensors = row_of(TwoTensor(torch.ones(2), torch.ones(2)))
    assert wrapper_problem("m.w", live, shorter, shorter_tensors) == (
        "m.w.a is torch.float32 (3,), saved torch.float32 (2,)"
    )
