"""Nested state to named tensors and a JSON skeleton, and back.

A skeleton is the state with every tensor replaced by ``{"$tensor": name}``. What JSON cannot say is tagged with a
``$`` key; keys of users that begin with ``$`` are kept apart by the tag ``$items``. Nothing is ever pickled.
"""

from __future__ import annotations

import base64
import enum
import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from deepvm.checkpoint.layout import disguise, undisguise
from deepvm.errors import CheckpointError, Corrupt


class Tensors(dict[str, torch.Tensor]):
    """Tensors by name, each memory once: a tied tensor is the name under which it came first."""

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[tuple[Any, ...], str] = {}

    def add(self, name: str, tensor: torch.Tensor) -> dict[str, Any]:
        plain, real = disguise(tensor)
        memory = (plain.data_ptr(), plain.dtype, plain.shape, plain.stride()) if plain.numel() else (name,)
        found = self._names.get(memory)
        if found is None:
            while name in self:  # two paths may join to one name: "a.b" + "c" and "a" + "b.c"
                name += "'"
            found = self._names[memory] = name
            self[name] = plain
        return {"$tensor": found} if real is None else {"$tensor": found, "real": real}


class Inline(Tensors):
    """Puts tensors into the skeleton itself. For state of which every rank has its own: a file has the tensors that all
    ranks have in common, and a skeleton for each rank."""

    def add(self, name: str, tensor: torch.Tensor) -> dict[str, Any]:  # noqa: ARG002 - as its base has it
        disguise(tensor)  # or it says why it cannot be saved
        plain = tensor.detach().cpu().resolve_conj().contiguous().reshape(-1).view(torch.uint8)
        dtype = str(tensor.dtype).removeprefix("torch.")
        return {
            "$inline": base64.b64encode(plain.numpy().tobytes()).decode(),
            "dtype": dtype,
            "shape": list(tensor.shape),
        }


def flatten(value: Any, name: str, tensors: Tensors) -> Any:
    """The skeleton of a value; its tensors are added to ``tensors``, as they are."""
    if isinstance(value, torch.Tensor):
        return tensors.add(name, value)
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, dict):
        return _flatten_dict(value, name, tensors)
    if kind in (list, tuple, set, frozenset):
        items = [flatten(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]
        return items if kind is list else {f"${kind.__name__}": items}
    return _flatten_rare(value, name, tensors)


def _flatten_dict(value: dict[Any, Any], name: str, tensors: Tensors) -> Any:
    if all(type(key) is str and not key.startswith("$") for key in value):
        found: Any = {key: flatten(item, f"{name}.{key}", tensors) for key, item in value.items()}
    else:
        found = {
            "$items": [
                [flatten(key, name, tensors), flatten(item, f"{name}.{key}", tensors)] for key, item in value.items()
            ]
        }
    versions = getattr(value, "_metadata", None)  # a module's state_dict tells the versions of its modules
    if isinstance(value, OrderedDict) and versions is not None:
        return {"$module": found, "versions": {k: dict(v) for k, v in versions.items()}}
    return found


def _flatten_rare(value: Any, name: str, tensors: Tensors) -> Any:
    if isinstance(value, bytes | bytearray):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.Size):
        return {"$tuple": [int(n) for n in value]}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"$device": str(value)}
    if isinstance(value, complex):
        return {"$complex": [repr(value.real), repr(value.imag)]}
    numpy_array = _as_numpy(value)
    if numpy_array is not None:
        scalar = numpy_array.ndim == 0 and not hasattr(value, "__array_finalize__")
        return {
            "$numpy": flatten(torch.from_numpy(numpy_array.copy()), name, tensors),
            "scalar": bool(scalar),
        }
    if isinstance(value, str | int | float) or hasattr(value, "_asdict"):
        plain = tuple(value) if hasattr(value, "_asdict") else _plain_of(value)
        return flatten(plain, name, tensors)  # enum members, named tuples and the like: their plain value
    if isinstance(value, torch.utils.data.DataLoader):
        raise CheckpointError(
            f"state {name!r} is a DataLoader, which cannot tell where in an epoch it is: give "
            "deepvm.checkpoint.resumable(loader), and train with that"
        )
    raise CheckpointError(
        f"state {name!r} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be saved: "
        "give it state_dict and load_state_dict, or plain values"
    )


def _plain_of(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, int):
        return int.__int__(value)
    return float.__float__(value) if isinstance(value, float) else str.__str__(value)


def _as_numpy(value: Any) -> Any:
    import numpy as np

    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            return None
        return np.ascontiguousarray(value) if value.ndim else value
    return np.asarray(value) if isinstance(value, np.generic) else None


def rebuild(skeleton: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The state that a skeleton and its tensors stand for."""
    if isinstance(skeleton, list):
        return [rebuild(item, tensors) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    tag = next((key for key in skeleton if key.startswith("$")), None)
    if tag is None:
        return {key: rebuild(item, tensors) for key, item in skeleton.items()}
    try:
        return _REBUILD[tag](skeleton, tensors)
    except KeyError:
        raise Corrupt(f"the saved state has {tag!r}, or a tensor, that this version does not know") from None


def _rebuild_module(skeleton: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    state = OrderedDict(rebuild(skeleton["$module"], tensors))
    state._metadata = OrderedDict(skeleton["versions"])  # type: ignore[attr-defined]
    return state


def _rebuild_numpy(skeleton: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    array = rebuild(skeleton["$numpy"], tensors).numpy().copy()
    return array[()] if skeleton["scalar"] else array


def _rebuild_inline(skeleton: dict[str, Any], _: Mapping[str, torch.Tensor]) -> torch.Tensor:
    data, dtype = bytearray(base64.b64decode(skeleton["$inline"])), getattr(torch, skeleton["dtype"])
    flat = torch.frombuffer(data, dtype=torch.uint8).view(dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(skeleton["shape"])


_REBUILD: dict[str, Any] = {
    "$tensor": lambda s, t: undisguise(t[s["$tensor"]], s["real"]) if "real" in s else t[s["$tensor"]],
    "$float": lambda s, _: float(s["$float"]),
    "$tuple": lambda s, t: tuple(rebuild(s["$tuple"], t)),
    "$set": lambda s, t: set(rebuild(s["$set"], t)),
    "$frozenset": lambda s, t: frozenset(rebuild(s["$frozenset"], t)),
    "$items": lambda s, t: {rebuild(k, t): rebuild(v, t) for k, v in s["$items"]},
    "$bytes": lambda s, _: base64.b64decode(s["$bytes"]),
    "$dtype": lambda s, _: getattr(torch, s["$dtype"]),
    "$device": lambda s, _: torch.device(s["$device"]),
    "$complex": lambda s, _: complex(float(s["$complex"][0]), float(s["$complex"][1])),
    "$module": _rebuild_module,
    "$numpy": _rebuild_numpy,
    "$inline": _rebuild_inline,
}


def names_of_tensors(skeleton: Any) -> set[str]:
    """The names of all tensors in a skeleton."""
    found: set[str] = set()
    waiting = [skeleton]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            if isinstance(value.get("$tensor"), str):
                found.add(value["$tensor"])
            waiting += value.values()
    return found


def module_tensors(skeleton: Any) -> dict[str, str]:
    """Of a module's skeleton: its keys, and the names of the tensors that are saved for them as they are."""
    rows = skeleton.get("$module") if isinstance(skeleton, dict) else None
    if not isinstance(rows, dict):
        return {}
    return {key: row["$tensor"] for key, row in rows.items() if isinstance(row, dict) and row.keys() == {"$tensor"}}
