"""Documents in a checkpoint's metadata, as strangers may have written them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deepvm.checkpoint.state.documents import module_rows, skeleton_of_rank, witness_rows
from deepvm.errors import Corrupt

A, B = "0" * 16, "1" * 16


def witness(**changed: Any) -> dict[str, str]:
    document = {"step": 3, "ranks": [{"x": A, "y": A}, {"y": B}], **changed}
    return {"format": "f", "witness": json.dumps(document)}


def test_ranks_after_the_first_have_what_differs() -> None:
    assert witness_rows(witness(), "f", 3) == [{"x": A, "y": A}, {"x": A, "y": B}]


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({**witness(), "format": "g"}, "format"),
        ({"witness": witness()["witness"]}, "format"),
        ({"format": "f"}, "witness"),
        ({"format": "f", "witness": "[]"}, "step 3"),
        (witness(step=4), "step 3"),
        (witness(ranks=[]), "hashes"),
        (witness(ranks={}), "hashes"),
        (witness(ranks=[{"x": 1}]), "hashes"),
        (witness(ranks=[[]]), "hashes"),
    ],
)
def test_a_witness_of_another_shape_is_corrupt(metadata: dict[str, str], says: str) -> None:
    with pytest.raises(Corrupt, match=says):
        witness_rows(metadata, "f", 3)


def test_fewer_ranks_serve_in_turn() -> None:
    metadata = {"skeleton": json.dumps([{"a": 0}, {"a": 1}])}
    assert [skeleton_of_rank(metadata, rank) for rank in range(3)] == [{"a": 0}, {"a": 1}, {"a": 0}]


@pytest.mark.parametrize("text", [None, "[]", "{}", "[1]", "[{}, 1]", "nonsense"])
def test_a_skeleton_of_another_shape_is_corrupt(text: str | None) -> None:
    with pytest.raises(Corrupt, match="the saved state"):
        skeleton_of_rank({} if text is None else {"skeleton": text}, 0)


@pytest.mark.parametrize("pair", [["a", 1, 2], ["a"], "ab", [1, 2]])
def test_names_of_a_module_are_taken_from_pairs_alone(pair: Any) -> None:
    assert module_rows({"$module": {"$items": [["$w", 1], ["b", 2]]}}) == {"$w": 1, "b": 2}
    rows = {"$items": [["$w", 1], pair]}
    assert module_rows({"$module": rows}) == rows
