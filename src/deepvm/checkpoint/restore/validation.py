"""A selection and its tensors -> rebuilt and checked states, before ``load`` or ``lazy`` changes anything.

What a component's own loading still refuses afterwards is undone.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

import torch

from deepvm.checkpoint.restore.selection import Selection
from deepvm.checkpoint.restore.tensor_views import TensorViews
from deepvm.checkpoint.state.fill import check_puttable
from deepvm.checkpoint.state.optimizer_state import rebuild_optimizer
from deepvm.checkpoint.state.owners import inner_optimizer
from deepvm.checkpoint.state.skeleton import RESERVED, LaidOut, names_of_tensors, rebuild
from deepvm.checkpoint.state.tensor_kinds import laid_out
from deepvm.errors import Corrupt


def prepare(selected: Selection, tensors: Any) -> dict[str, Any]:
    """Rebuild and check the states of all components but modules. Those with a ``load_state_dict`` come first, since it
    may refuse them. ``tensors`` are OwnedTensors or TensorsToCheck."""
    for name, own in selected.own.items():
        _check_module(own, selected.skeleton[name], TensorsToCheck(tensors.views))
    loaded: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for name, component in selected.components.items():
        if name not in selected.own:
            state = rebuilt(selected, name, tensors)
            _check(name, component, state, selected.skeleton[name])
            (loaded if hasattr(component, "load_state_dict") else values)[name] = state
    return loaded | values


def rebuilt(selected: Selection, name: str, tensors: Any) -> Any:
    component, skeleton = selected.components[name], selected.skeleton[name]
    if isinstance(component, torch.optim.Optimizer):
        return rebuild_optimizer(component, skeleton, tensors, tensors.views)
    copied = isinstance(component, torch.Tensor)
    return rebuild(skeleton, tensors.views if copied else tensors)


def _check(name: str, component: Any, state: Any, skeleton: Any) -> None:
    """Check a state without changing its component, as far as that is possible."""
    if hasattr(component, "check_state_dict"):
        if name.startswith(RESERVED) or not names_of_tensors(skeleton):
            component.check_state_dict(state)
    elif isinstance(component, torch.Tensor):
        _check_tensor(name, component, state)
    elif not hasattr(component, "load_state_dict"):
        check_puttable(component, state)


def _check_tensor(name: str, live: torch.Tensor, saved: Any) -> None:
    if not isinstance(saved, torch.Tensor) or saved.shape != live.shape:
        found = f"shape {tuple(saved.shape)}" if isinstance(saved, torch.Tensor) else f"a {type(saved).__name__}"
        raise Corrupt(f"{name} is a tensor of shape {tuple(live.shape)}, but the checkpoint has {found}")


def _check_module(own: Mapping[str, Any], skeleton: Any, tensors: TensorsToCheck) -> None:
    """Rebuild all that is not a plain tensor; the shapes of those were compared before."""
    for key, row in skeleton.get("$module", skeleton).items():
        if not isinstance(row, dict) or row.keys() != {"$tensor"}:
            found = rebuild(row, tensors)
            live = own[key]
            if isinstance(live, torch.Tensor) and not torch.nn.parameter.is_lazy(live):
                _check_tensor(key, live, found)


class TensorsToCheck(LaidOut, dict[str, torch.Tensor]):
    """Tensors whose bytes may not have arrived: only their shapes and types are used."""

    def __init__(self, views: TensorViews) -> None:
        super().__init__()
        self.views = views

    def __missing__(self, name: str) -> torch.Tensor:
        return self.views[name]

    def laid_out(self, row: dict[str, Any]) -> torch.Tensor:
        tensor: torch.Tensor = rebuild({key: value for key, value in row.items() if key != "stride"}, self)
        laid_out(tensor.to("meta"), row["stride"])  # raises if it cannot
        return tensor


class Undo:
    """Sets the components' attributes back if a restore fails. It assumes that loading replaces attributes, as torch's
    optimizers, schedules and scalers do; a change within an attribute stays."""

    def __init__(self) -> None:
        self._before: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def keep(self, component: Any) -> None:
        for part in (component, inner_optimizer(component)):
            if hasattr(part, "__dict__"):
                self._before.append((vars(part), dict(vars(part))))

    def __enter__(self) -> Undo:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if kind is not None:
            for attributes, before in reversed(self._before):
                attributes.clear()
                attributes.update(before)
