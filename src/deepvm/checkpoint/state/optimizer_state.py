"""An optimizer's saved state -> its state_dict: with the layouts of its current parameters, and in linear time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, Protocol

import torch

from deepvm.checkpoint.state.skeleton import is_tensor_row, rebuild
from deepvm.checkpoint.state.tensor_kinds import is_direct, own_stride
from deepvm.errors import Corrupt
from deepvm.strict_json import brief


class _Numbers(list[int]):
    """Numbers of parameters. torch checks for each value of the state whether its parameter is in the group; in a list
    that takes 10^9 comparisons for 30,000 parameters."""

    def __init__(self, numbers: list[int]) -> None:
        super().__init__(numbers)
        self._known = frozenset(numbers)

    def __contains__(self, number: object) -> bool:
        return number in self._known

    def __deepcopy__(self, _: object) -> list[int]:
        return list(self)


class Shapes(Protocol):
    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a saved tensor."""
        ...


def loads_as_torch(optimizer: torch.optim.Optimizer) -> bool:
    """True if it loads the form of state that torch describes: that of each parameter by its number, and groups."""
    plain = type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict
    return plain and not optimizer._optimizer_load_state_dict_pre_hooks


def check_form(name: str, skeleton: Any) -> None:
    """Raise Corrupt unless it is the skeleton of a state that torch describes."""
    groups, state = (skeleton.get(key) if isinstance(skeleton, dict) else None for key in ("param_groups", "state"))
    if not isinstance(groups, list) or not all(_is_group(group) for group in groups):
        raise Corrupt(f"the saved groups of {name} are {brief(groups)}, not a list of groups with their parameters")
    items = state.get("$items", []) if isinstance(state, dict) else None
    named = [key for key in state if key.startswith("$")] if isinstance(state, dict) else []
    if named not in ([], ["$items"]) or not isinstance(items, list) or not all(_is_item(item) for item in items):
        raise Corrupt(f"the saved state of {name} is {brief(state)}, not that of each parameter")


def check_kinds(name: str, optimizer: torch.optim.Optimizer, skeleton: Any) -> None:
    """Raise Corrupt if a setting or a value is of another kind than the optimizer's own: its next step would fail.

    Other optimizers than torch's may have values of any kind, if these are not numbers or tensors elsewhere."""
    own = type(optimizer).__module__.startswith("torch.optim.") and not isinstance(optimizer, torch.optim.LBFGS)
    for live, saved in zip(optimizer.param_groups, skeleton["param_groups"], strict=False):
        for key in live.keys() & saved.keys() - {"params", "param_names"}:
            if not _is_like(live[key], saved[key], own):
                found = f"{brief(saved[key])}, where the live one has {brief(live[key])}"
                raise Corrupt(f"{key} of a group of {name} is {found}")
    rows = [row for _, row in skeleton["state"].get("$items", []) if isinstance(row, dict)]
    rows_live = [row for row in optimizer.state.values() if isinstance(row, dict)]
    tensors = {key for row in rows for key, value in row.items() if is_tensor_row(value)}
    tensors |= {key for row in rows_live for key, value in row.items() if isinstance(value, torch.Tensor)}
    for row in rows:
        for key, value in row.items():
            plain = value is None or type(value) in (bool, int, float)  # momentum before a gradient, an older step
            if is_tensor_row(value) or plain or (isinstance(value, list) and not own):
                continue
            if own or key in tensors:
                raise Corrupt(f"{key} of a parameter in {name} is {brief(value)}, neither a tensor nor a number")


_NUMBER_TAGS = frozenset({"$float", "$complex", "$tensor", "$numpy", "$inline"})


def _is_like(live: Any, saved: Any, own: bool) -> bool:
    """True if a saved setting may replace a live one."""
    if isinstance(live, tuple):
        items = saved.get("$tuple") if isinstance(saved, dict) else saved
        if not isinstance(items, list) or len(items) != len(live):
            return False
        return all(_is_like(mine, theirs, own) for mine, theirs in zip(live, items, strict=True))
    number = type(saved) in (bool, int, float) or (isinstance(saved, dict) and not _NUMBER_TAGS.isdisjoint(saved))
    if live is None or isinstance(live, bool):
        return number or saved is None or isinstance(saved, str) or not own
    if isinstance(live, int | float):
        return number or (saved is None and not own)
    return not isinstance(live, str) or type(saved) is str


def _is_group(group: Any) -> bool:
    numbers = group.get("params") if isinstance(group, dict) else None
    return isinstance(numbers, list) and all(type(number) is int for number in numbers)


def _is_item(item: Any) -> bool:
    return isinstance(item, list) and len(item) == 2 and isinstance(item[0], int | str)


def rebuild_optimizer(
    optimizer: torch.optim.Optimizer, skeleton: Any, tensors: Mapping[str, torch.Tensor], shapes: Shapes
) -> Any:
    """Return all of its state, for its own load_state_dict."""
    return with_numbers(rebuild(with_layouts(optimizer, skeleton, shapes), tensors))


def with_numbers(state: Any) -> Any:
    """Return a state_dict in which torch finds parameters fast."""
    groups = state.get("param_groups") if isinstance(state, dict) else None
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return state
    found = [{**group, "params": _Numbers(group["params"])} if "params" in group else group for group in groups]
    return {**state, "param_groups": found}


def with_layouts(optimizer: torch.optim.Optimizer, skeleton: Any, shapes: Shapes) -> Any:
    """Return the skeleton with the current layout of each parameter for tensors of its shape, unless they were saved
    with another layout than their parameter's."""
    state = skeleton.get("state") if isinstance(skeleton, dict) else None
    items = state.get("$items") if isinstance(state, dict) else None
    if not isinstance(state, dict) or not isinstance(items, list) or not isinstance(skeleton.get("param_groups"), list):
        return skeleton
    live = dict(_live_layouts(optimizer, skeleton["param_groups"]))
    if not live:
        return skeleton
    found = [
        [number, values if number not in live else _laid_out(values, *live[number], shapes)] for number, values in items
    ]
    return {**skeleton, "state": {**state, "$items": found}}


def _live_layouts(
    optimizer: torch.optim.Optimizer, groups: list[Any]
) -> Iterator[tuple[int, tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Yield shapes and strides of parameters that do not lie row by row, by the numbers of the saved ones."""
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    numbers = chain.from_iterable(group["params"] for group in groups)
    for number, parameter in zip(numbers, parameters, strict=False):
        stride = own_stride(parameter) if is_direct(parameter) else None
        if stride is not None:
            yield number, (tuple(parameter.shape), stride)


def _laid_out(values: Any, shape: tuple[int, ...], stride: tuple[int, ...], shapes: Shapes) -> Any:
    if not isinstance(values, dict):
        return values
    inner = next((tag for tag in ("$ordered", "$defaultdict") if tag in values), None)
    if inner is not None:
        return {**values, inner: _laid_out(values[inner], shape, stride, shapes)}
    return {
        key: {**row, "stride": list(stride)} if _follows(row, shape, shapes) else row for key, row in values.items()
    }


def _follows(row: Any, shape: tuple[int, ...], shapes: Shapes) -> bool:
    if not isinstance(row, dict) or "$tensor" not in row or "stride" in row:
        return False
    saved = shapes.shape(row["$tensor"])
    return shape == (saved[:-1] if str(row.get("real", "")).startswith("complex") else saved)
