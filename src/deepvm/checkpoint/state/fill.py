"""Restored values -> the objects that the caller holds: containers keep their identity, tensors and arrays their
memory. What cannot be filled, since it is immutable or has another shape, is replaced by what was saved."""

from __future__ import annotations

import copy
import enum
from collections.abc import Mapping, MutableMapping, MutableSet
from typing import Any, TypeAlias

import torch

from deepvm.checkpoint.state.skeleton import flatten_context, rebuild
from deepvm.checkpoint.state.tensor_kinds import check_fillable, class_name, inner_tensors, is_wrapper

Filled: TypeAlias = dict[int, tuple[Any, Any, Any]]  # by identity: an object, its saved value, what holds that now


@torch.no_grad()
def put(live: Any, saved: Any) -> Any:
    """Put a saved value into the object that held the one before; return the object that holds it now."""
    return _put(live, saved, {})


def _put(live: Any, saved: Any, filled: Filled) -> Any:
    """An object that the caller holds in two places, as in ``[[0]] * 2``, stays one if both get the same value; else
    the second place gets a copy of it, with its own value."""
    known = filled.get(id(live))
    if known is not None:
        _, earlier, result = known
        return result if _same(earlier, saved) else _put(_copy_of(live), saved, filled)
    if not can_hold(live) and not _is_array(live):
        return _put_value(live, saved, filled)
    filled[id(live)] = live, saved, live  # it may contain itself
    result = _put_held(live, saved, filled)
    filled[id(live)] = live, saved, result
    return result


def _copy_of(live: Any) -> Any:
    """Return another object of its kind; None if copying it may have side effects."""
    if isinstance(live, torch.Tensor):
        return live.detach().clone()
    known = hasattr(live, "__copy__") or type(live).__module__ in ("builtins", "collections", "numpy")
    return copy.copy(live) if known else None


def _put_held(live: Any, saved: Any, filled: Filled) -> Any:
    if isinstance(live, torch.Tensor):
        return live if isinstance(saved, torch.Tensor) and fill(live, saved) else saved
    if isinstance(live, MutableMapping) and isinstance(saved, dict):
        new = {key: _put(live.get(key), value, filled) for key, value in saved.items()}
        live.clear()
        live.update(new)
        return live
    if isinstance(live, list) and isinstance(saved, list):
        live[:] = _each(live, saved, filled)
        return live
    if isinstance(live, MutableSet) and isinstance(saved, set):
        live.clear()
        for item in saved:
            live.add(item)
        return live
    if isinstance(live, bytearray) and isinstance(saved, bytes):
        live[:] = saved
        return live
    return _put_array(live, saved)


def _put_value(live: Any, saved: Any, filled: Filled) -> Any:
    if isinstance(live, tuple) and isinstance(saved, tuple):
        return _put_tuple(live, saved, filled)
    if isinstance(live, enum.Enum) and not isinstance(saved, enum.Enum):
        return type(live)(saved)
    return saved


def _same(one: Any, other: Any) -> bool:
    """True if two saved values are equal, including tensors and arrays within them."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, torch.Tensor):
        return one is other or (one.dtype == other.dtype and torch.equal(one, other))
    if _is_array(one):
        return bool(_alike_arrays(one, other) and one.tobytes() == other.tobytes())
    return bool(one == other or (one != one and other != other))  # NaN is not equal to itself


def check_puttable(live: Any, saved: Any) -> None:
    """Raise what ``put`` would raise, without changing anything."""
    if isinstance(live, enum.Enum) and not isinstance(saved, enum.Enum):
        type(live)(saved)
    elif isinstance(live, MutableMapping) and isinstance(saved, dict):
        for key, value in saved.items():
            check_puttable(live.get(key), value)
    elif isinstance(live, list | tuple) and isinstance(saved, type(live) if isinstance(live, list) else tuple):
        for old, new in zip(live, saved, strict=False):
            check_puttable(old, new)


def can_hold(value: Any) -> bool:
    """True if ``put`` fills the object itself with a saved value of its kind."""
    return isinstance(value, torch.Tensor | MutableMapping | list | MutableSet | bytearray)


def _each(live: Any, saved: Any, filled: Filled) -> list[Any]:
    held = [*live, *[None] * (len(saved) - len(live))]
    return [_put(old, new, filled) for old, new in zip(held, saved, strict=False)]


def _put_tuple(live: Any, saved: tuple[Any, ...], filled: Filled) -> Any:
    items = _each(live, saved, filled)
    if len(items) == len(live) and all(old is new for old, new in zip(live, items, strict=True)):
        return live
    named = hasattr(live, "_make") and len(live) == len(items)
    return type(live)._make(items) if named else tuple(items)


def _is_array(value: Any) -> bool:
    import numpy as np

    return isinstance(value, np.ndarray)


def _put_array(live: Any, saved: Any) -> Any:
    if _alike_arrays(live, saved) and live.flags.writeable:
        live[...] = saved
        return live
    return saved


def _alike_arrays(one: Any, other: Any) -> bool:
    return _is_array(one) and _is_array(other) and (one.shape, one.dtype) == (other.shape, other.dtype)


def fill(live: torch.Tensor, saved: torch.Tensor) -> bool:
    """Copy a tensor into another of its kind; False, with nothing changed, if it is of another kind. The caller has
    disabled gradients."""
    if not _alike(live, saved):
        return False
    if is_wrapper(live):
        mine, theirs = inner_tensors(live)[0], inner_tensors(saved)[0]
        for name in mine:
            fill(mine[name], theirs[name])
        return True
    live.copy_(saved)
    return True


def _alike(live: torch.Tensor, saved: torch.Tensor) -> bool:
    if is_wrapper(live) != is_wrapper(saved) or live.shape != saved.shape or live.dtype != saved.dtype:
        return False
    if is_wrapper(live):
        (mine, own), (theirs, other) = inner_tensors(live), inner_tensors(saved)
        same_kind = type(live) is type(saved) and mine.keys() == theirs.keys() and own == other
        return same_kind and all(_alike(mine[name], theirs[name]) for name in mine)
    return not live.is_meta and torch._debug_has_internal_overlap(live) != 1  # an expanded one cannot be written


# --- wrappers in modules --------------------------------------------------------------------------------------------


def wrapper_problem(name: str, live: Any, row: Any, tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Return why a saved tensor's row cannot fill a module's tensor, if one of them is a wrapper; else None."""
    saved_kind = row.get("$wrapper") if isinstance(row, dict) else None
    if not is_wrapper(live):
        return None if saved_kind is None else f"{name} is a plain tensor, saved {saved_kind}"
    if saved_kind != class_name(live):
        return f"{name} is {class_name(live)}, saved {saved_kind or 'a plain tensor'}"
    inner, context = inner_tensors(live)
    if row["inner"].keys() != inner.keys():
        return f"{name} holds {', '.join(inner)}, saved {', '.join(row['inner'])}"
    if flatten_context(name, live, context) != row["context"]:
        return f"{name} has the settings {context!r}, saved {rebuild(row['context'], tensors)!r}"
    for key, part in inner.items():
        found = wrapper_problem(f"{name}.{key}", part, row["inner"][key], tensors)
        if found is None and not is_wrapper(part):
            saved = rebuild(row["inner"][key], tensors)
            if (part.shape, part.dtype) != (saved.shape, saved.dtype):
                found = f"{name}.{key} is {part.dtype} {tuple(part.shape)}, saved {saved.dtype} {tuple(saved.shape)}"
        if found is not None:
            return found
    return None


def fill_wrapper(live: Any, row: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill the tensors that a wrapper holds from a saved one's row, which fits."""
    for key, part in inner_tensors(live)[0].items():
        if is_wrapper(part):
            fill_wrapper(part, row["inner"][key], tensors)
        else:
            check_fillable(key, part)
            with torch.no_grad():
                part.copy_(rebuild(row["inner"][key], tensors))
