"""The tensor that differs between ranks, as text: for the error of a save that no rank can make."""

from __future__ import annotations

import json
from typing import Any

from deepvm.checkpoint import ranks
from deepvm.checkpoint.state.capture import Captured

_FIX = "nothing is saved before all ranks have the same names, types and shapes"
_SHARDED = "sharded state goes through torch.distributed.checkpoint"


def name_difference(captured: Captured, other: int) -> str:
    """Describe the first tensor in which a rank differs from rank 0. Every rank calls it and gets the same text."""
    rank, _ = ranks.rank_and_world_size()
    own = _described(captured) if rank in (0, other) else None
    values = ranks.meet("save()", own).values
    first, second = values[0], values[other]
    for name in {**first["tensors"], **second["tensors"]}:
        mine, theirs = (_found(side, name) for side in (first, second))
        if mine != theirs:
            return f"{name} is {mine} on rank 0 and {theirs} on rank {other}: {_FIX}; {_SHARDED}"
    return f"rank {other} has the tensors of rank 0 in another order: {_FIX}; {_SHARDED}"


def _described(captured: Captured) -> dict[str, Any]:
    tensors = {
        name: f"a tensor ({str(tensor.dtype).removeprefix('torch.')}, shape {list(tensor.shape)})"
        for name, tensor in captured.tensors.items()
    }
    plain = {name: _plain(json.loads(bytes(text))) for name, text in captured.texts.items()}
    return {"tensors": tensors, "plain": {name: text for name, text in plain.items() if text is not None}}


def _plain(skeleton: Any) -> Any:
    """Return a component's plain values that may be tensors on another rank: itself, or those directly in it."""
    if not isinstance(skeleton, dict):
        return _kind(skeleton)
    rows = {key: _kind(value) for key, value in skeleton.items() if not key.startswith("$")}
    return {key: kind for key, kind in rows.items() if kind is not None} or None


def _kind(value: Any) -> str | None:
    if value is None:
        return "None"
    if isinstance(value, dict):
        return "a float" if "$float" in value else None
    names = {"bool": "a bool", "int": "an int", "float": "a float", "str": "a text", "list": "a list"}
    return names.get(type(value).__name__)


def _found(side: dict[str, Any], name: str) -> str:
    if name in side["tensors"]:
        return str(side["tensors"][name])
    component, _, key = name.partition(".")
    plain = side["plain"].get(component)
    found = plain.get(key) if isinstance(plain, dict) else plain if not key else None
    return str(found or "missing")
