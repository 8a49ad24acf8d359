"""Nested state to named tensors and a JSON skeleton, and back.

A skeleton is the state with every tensor replaced by ``{"$tensor": name}``. What JSON cannot represent is tagged with a
``$`` key; users' keys that begin with ``$`` are stored under the tag ``$items``. Nothing is ever pickled, and no class
is looked up: a named tuple becomes a tuple, an enum's member its value, and a dict of a class of your own a dict.
"""

from __future__ import annotations

import base64
import enum
import json
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from deepvm import strict_json as strict
from deepvm.checkpoint.state.documents import is_tensor_row as is_tensor_row
from deepvm.checkpoint.state.documents import module_rows
from deepvm.checkpoint.state.documents import module_tensors as module_tensors
from deepvm.checkpoint.state.documents import names_of_tensors as names_of_tensors
from deepvm.checkpoint.state.layout import METADATA, dtype_named, from_storable, to_storable
from deepvm.checkpoint.state.tensor_kinds import (
    check_readable,
    class_name,
    class_named,
    inner_tensors,
    is_sharded,
    is_wrapper,
    laid_out,
    own_stride,
    usual_stride,
)
from deepvm.errors import CheckpointError, Corrupt
from deepvm.store.state_check import is_array_dtype, is_device_name

RESERVED = "deepvm."  # prefix of our own components: a checkpoint may have them, or not


_DICTS = {OrderedDict: "$ordered", Counter: "$counter"}
_FACTORIES: dict[str, Any] = {  # of defaultdicts, by the names that state_check has: none is looked up
    "int": int, "float": float, "bool": bool, "str": str, "list": list, "dict": dict, "set": set, "tuple": tuple,
    "Counter": Counter, "OrderedDict": OrderedDict, "None": None,
}  # fmt: skip


class Tensors(dict[str, torch.Tensor]):
    """Tensors by name, each memory once: a tied tensor has the name of the first one. A tensor's strides are in its row
    if they are not the usual ones: those in ``usual`` by its id, else row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.usual: Mapping[int, tuple[int, ...]] = {}
        self._names: dict[tuple[Any, ...], str] = {}

    def add(self, name: str, tensor: torch.Tensor) -> dict[str, Any]:
        if is_wrapper(tensor) and not is_sharded(tensor) and not tensor.is_nested:
            return self._add_wrapper(name, tensor)
        check_readable(name, tensor)
        stride, usual = own_stride(tensor), self.usual.get(id(tensor))
        try:
            plain, real = to_storable(tensor)
        except CheckpointError as error:
            raise CheckpointError(f"{name} is {error}") from None
        memory = (plain.data_ptr(), plain.dtype, plain.shape, plain.stride()) if plain.numel() else (name,)
        found = self._names.get(memory)
        if found is None:
            name = _nameable(name)
            while name in self or name == METADATA:  # two paths may join to one: "a.b" + "c" and "a" + "b.c"
                name += "'"
            found = self._names[memory] = name
            self[name] = plain
        row: dict[str, Any] = {"$tensor": found}
        if real is not None:
            row["real"] = real
        if stride != usual:
            row["stride"] = list(stride or usual_stride(tensor.shape))
        return row

    def _add_wrapper(self, name: str, tensor: torch.Tensor) -> dict[str, Any]:
        inner, context = inner_tensors(tensor)
        return {
            "$wrapper": class_name(tensor),
            "inner": {key: flatten(part, f"{name}.{key}", self) for key, part in inner.items()},
            "context": flatten_context(name, tensor, context),
            "shape": list(tensor.shape),
            "stride": list(tensor.stride()),
        }


def flatten_context(name: str, tensor: torch.Tensor, context: Any) -> Any:
    """Return the skeleton of a wrapper's settings, which must be restored unchanged."""
    inside = Tensors()
    try:
        found = flatten(context, name, inside)
        same = not inside and rebuild(json.loads(json.dumps(found, allow_nan=False)), {}) == context
    except CheckpointError:
        same = False
    if not same:
        raise CheckpointError(
            f"{name} is a {type(tensor).__module__}.{type(tensor).__qualname__}, whose settings are not plain values "
            f"and cannot be saved: {context!r:.200}"
        )
    return found


def is_encodable(text: str) -> bool:
    """True if text can be written as UTF-8: it has no lone surrogates, as the name of a file may."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode(errors="surrogatepass")).decode()


def _nameable(name: str) -> str:
    """Return the name of a tensor as a file can have it."""
    return name if is_encodable(name) else name.encode(errors="backslashreplace").decode()


class Inline(Tensors):
    """Puts tensors into the skeleton itself, for state that differs between ranks: a file has the tensors that all
    ranks have in common, and a skeleton for each rank."""

    def add(self, name: str, tensor: torch.Tensor) -> dict[str, Any]:
        check_readable(name, tensor)
        to_storable(tensor)  # raises if it cannot be saved
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        dtype = str(tensor.dtype).removeprefix("torch.")
        return {
            "$inline": base64.b64encode(plain.numpy().tobytes()).decode(),
            "dtype": dtype,
            "shape": list(tensor.shape),
        }


def flatten(value: Any, name: str, tensors: Tensors) -> Any:
    """Return the skeleton of a value; its tensors are added to ``tensors``, as they are."""
    if isinstance(value, torch.Tensor):
        return tensors.add(name, value)
    kind = type(value)
    if value is None or kind in (bool, int):
        return value
    if kind is str:
        return value if is_encodable(value) else {"$surrogates": _encoded(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, dict):
        return _flatten_dict(value, name, tensors)
    if kind in (list, tuple, set, frozenset):
        items = [flatten(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]
        return items if kind is list else {f"${kind.__name__}": items}
    return _flatten_rare(value, name, tensors)


def _flatten_dict(value: dict[Any, Any], name: str, tensors: Tensors) -> Any:
    if all(type(key) is str and not key.startswith("$") and is_encodable(key) for key in value):
        found: Any = {key: flatten(item, f"{name}.{key}", tensors) for key, item in value.items()}
    else:
        found = {
            "$items": [
                [flatten(key, name, tensors), flatten(item, f"{name}.{key}", tensors)] for key, item in value.items()
            ]
        }
    versions = getattr(value, "_metadata", None)  # a module's state_dict has the versions of its modules
    if isinstance(value, OrderedDict) and versions is not None:
        return {"$module": found, "versions": {k: dict(v) for k, v in versions.items()}}
    kind = type(value)
    if kind is defaultdict:
        factory = getattr(value, "default_factory", None)
        known = next((name for name, one in _FACTORIES.items() if one is factory), None)
        return found if known is None else {"$defaultdict": found, "factory": known}
    return {_DICTS[kind]: found} if kind in _DICTS else found


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
        return _flatten_numpy(value, numpy_array, name, tensors)
    if isinstance(value, str | int | float | enum.Enum) or hasattr(value, "_asdict"):
        plain = tuple(value) if hasattr(value, "_asdict") else _plain_of(value)
        return flatten(plain, name, tensors)  # enum members, named tuples and the like: their plain value
    if isinstance(value, torch.utils.data.DataLoader):
        raise CheckpointError(
            f"state {name!r} is a DataLoader, which has no position in an epoch: pass "
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

    if not isinstance(value, np.ndarray | np.generic) or value.dtype.hasobject or value.dtype.names:
        return None
    return np.asarray(value)


def _flatten_numpy(value: Any, array: Any, name: str, tensors: Tensors) -> dict[str, Any]:
    scalar = array.ndim == 0 and not hasattr(value, "__array_finalize__")
    copy = array.copy(order="K")
    row: dict[str, Any] = {"scalar": bool(scalar)}
    try:
        tensor = torch.from_numpy(copy)
    except (TypeError, ValueError):  # dates, texts, numbers of the other byte order: their bytes and their type
        row |= {"dtype": array.dtype.str, "shape": list(array.shape)}
        tensor = torch.frombuffer(bytearray(array.tobytes()) or bytearray(1), dtype=torch.uint8)
    return {"$numpy": tensors.add(name, tensor), **row}


def rebuild(skeleton: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Rebuild the state from a skeleton and its tensors."""
    if isinstance(skeleton, list):
        return [rebuild(item, tensors) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    tag = "$tensor" if "$tensor" in skeleton else next((key for key in skeleton if key.startswith("$")), None)
    if tag is None:
        return {key: rebuild(item, tensors) for key, item in skeleton.items()}
    try:
        return _REBUILD[tag](skeleton, tensors)
    except KeyError:
        raise Corrupt(f"the saved state has {tag!r}, or a tensor, that this version does not know") from None
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise Corrupt(f"the saved state has {tag!r}, which cannot be read: {type(error).__name__} {error}") from error


def _rebuild_module(skeleton: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    state = OrderedDict((key, rebuild(row, tensors)) for key, row in module_rows(skeleton).items())
    state._metadata = OrderedDict(skeleton["versions"])  # type: ignore[attr-defined]
    return state


def _rebuild_numpy(skeleton: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    import numpy as np

    array = rebuild(skeleton["$numpy"], tensors).numpy().copy(order="K")
    if "dtype" in skeleton:
        if not is_array_dtype(skeleton["dtype"]):
            raise Corrupt(f"the saved state has an array of type {strict.brief(skeleton['dtype'])}")
        dtype, shape = np.dtype(skeleton["dtype"]), skeleton["shape"]
        array = np.frombuffer(array.tobytes(), dtype, math.prod(shape)).reshape(shape).copy()
    return array[()] if skeleton["scalar"] else array


def _rebuild_tensor(row: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if "stride" in row and isinstance(tensors, LaidOut):
        return tensors.laid_out(row)
    tensor = tensors[row["$tensor"]]
    if "real" in row:
        tensor = from_storable(tensor, row["real"])
    return laid_out(tensor, row["stride"]) if "stride" in row else tensor


class LaidOut:
    """Keeps the copies that are made for other strides, so that tied tensors stay tied."""

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[str, torch.Tensor] = {}

    def forget_copies(self) -> None:
        self._copies.clear()

    def laid_out(self, row: dict[str, Any]) -> torch.Tensor:
        key = json.dumps(row)
        if key not in self._copies:
            bare = {name: value for name, value in row.items() if name != "stride"}
            self._copies[key] = laid_out(_rebuild_tensor(bare, self), row["stride"])  # type: ignore[arg-type]
        return self._copies[key]


def _rebuild_wrapper(row: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    inner = {key: rebuild(part, tensors) for key, part in row["inner"].items()}
    if not all(isinstance(part, torch.Tensor) for part in inner.values()):
        raise Corrupt(f"a saved tensor of class {strict.brief(row['$wrapper'])} has parts that are not tensors")
    size, stride = torch.Size(row["shape"]), tuple(row["stride"])
    return class_named(row["$wrapper"]).__tensor_unflatten__(inner, rebuild(row["context"], tensors), size, stride)


def _rebuild_device(skeleton: dict[str, Any], _: Mapping[str, torch.Tensor]) -> torch.device:
    if not is_device_name(skeleton["$device"]):
        raise Corrupt(f"{strict.brief(skeleton['$device'])} is not the name of a device")
    return torch.device(skeleton["$device"])


def _rebuild_inline(skeleton: dict[str, Any], _: Mapping[str, torch.Tensor]) -> torch.Tensor:
    data, dtype = bytearray(base64.b64decode(skeleton["$inline"])), dtype_named(skeleton["dtype"])
    flat = torch.frombuffer(data, dtype=torch.uint8).view(dtype) if data else torch.empty(0, dtype=dtype, device="cpu")
    return flat.reshape(skeleton["shape"])


_REBUILD: dict[str, Any] = {
    "$tensor": _rebuild_tensor,
    "$wrapper": _rebuild_wrapper,
    "$float": lambda s, _: float(s["$float"]),
    "$tuple": lambda s, t: tuple(rebuild(s["$tuple"], t)),
    "$set": lambda s, t: set(rebuild(s["$set"], t)),
    "$frozenset": lambda s, t: frozenset(rebuild(s["$frozenset"], t)),
    "$items": lambda s, t: {rebuild(k, t): rebuild(v, t) for k, v in s["$items"]},
    "$ordered": lambda s, t: OrderedDict(rebuild(s["$ordered"], t)),
    "$counter": lambda s, t: Counter(rebuild(s["$counter"], t)),
    "$defaultdict": lambda s, t: defaultdict(_FACTORIES[s["factory"]], rebuild(s["$defaultdict"], t)),
    "$bytes": lambda s, _: base64.b64decode(s["$bytes"]),
    "$surrogates": lambda s, _: base64.b64decode(s["$surrogates"]).decode(errors="surrogatepass"),
    "$dtype": lambda s, _: dtype_named(s["$dtype"]),
    "$device": _rebuild_device,
    "$complex": lambda s, _: complex(float(s["$complex"][0]), float(s["$complex"][1])),
    "$module": _rebuild_module,
    "$numpy": _rebuild_numpy,
    "$inline": _rebuild_inline,
}
