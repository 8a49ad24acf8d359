"""The sentence about ranks whose states differ."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepvm.checkpoint import ranks
from deepvm.checkpoint.state import rank_difference
from deepvm.checkpoint.state.capture import Captured


def side(tensors: dict[str, torch.Tensor], **plain: Any) -> Captured:
    texts = {name: bytearray(json.dumps(value).encode()) for name, value in plain.items()}
    return Captured(tensors=tensors, texts=texts, same=False, replaced={})


def difference(first: Captured, second: Captured, monkeypatch: pytest.MonkeyPatch) -> str:
    told: list[Any] = []
    monkeypatch.setattr(ranks, "meet", lambda _, own: (told.append(own), SimpleNamespace(values=told[-2:]))[1])
    monkeypatch.setattr(ranks, "rank_and_world_size", lambda: (0, 2))
    told.append(rank_difference._described(first))
    return rank_difference.name_difference(second, 1).partition(":")[0]


ONE, OTHER = {"m.w": torch.zeros(2)}, {"m.w": torch.zeros(3)}


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (
            side(ONE),
            side(OTHER),
            "m.w is a tensor (float32, shape [2]) on rank 0 and a tensor (float32, shape [3]) on rank 1",
        ),
        (side(ONE), side({}), "m.w is a tensor (float32, shape [2]) on rank 0 and missing on rank 1"),
        (side(ONE), side({}, m={"w": 1}), "m.w is a tensor (float32, shape [2]) on rank 0 and an int on rank 1"),
        (side(ONE), side({}, m={"v": 1}), "m.w is a tensor (float32, shape [2]) on rank 0 and missing on rank 1"),
        (side(ONE), side({}, m=1.5), "m.w is a tensor (float32, shape [2]) on rank 0 and missing on rank 1"),
        (
            side({}, t=None),
            side({"t": torch.zeros(1)}),
            "t is None on rank 0 and a tensor (float32, shape [1]) on rank 1",
        ),
        (
            side({}, t={"$float": "nan"}),
            side({"t": torch.zeros(1)}),
            "t is missing on rank 0 and a tensor (float32, shape [1]) on rank 1",
        ),
        (side(ONE), side(ONE), "rank 1 has the tensors of rank 0 in another order"),
    ],
)
def test_the_first_difference_is_named(
    first: Captured, second: Captured, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert difference(first, second, monkeypatch) == says
