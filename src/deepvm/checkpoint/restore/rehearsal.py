"""All of a restore that can fail, before it changes anything: every component's state is rebuilt and checked here,
eager and lazy alike. What a component's own loading still refuses afterwards is undone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Protocol

import torch

from deepvm.checkpoint.restore.selection import Selection
from deepvm.checkpoint.restore.tensor_views import TensorViews
from deepvm.checkpoint.state.fill import check_puttable
from deepvm.checkpoint.state.optimizer_state import rebuild_optimizer
from deepvm.checkpoint.state.owners import inner_optimizer
from deepvm.checkpoint.state.skeleton import RESERVED, LaidOut, names_of_tensors, rebuild
from deepvm.checkpoint.state.tensor_kinds import laid_out
from deepvm.errors import Corrupt


class Given(Protocol):
    """Tensors by name for whoever asks for them, and those of the checkpoint that they are made of."""

    borrowed: TensorViews


def prepare(selected: Selection, tensors: Any) -> dict[str, Any]:
    """The states of all components but modules, rebuilt and found to be theirs; those with a loading of their own come
    first, since it may refuse them. ``tensors`` are as Given tells."""
    for name, own in selected.own.items():
        _check_module(own, selected.skeleton[name], Shown(tensors.borrowed))
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
        return rebuild_optimizer(component, skeleton, tensors, tensors.borrowed)
    plain = isinstance(component, torch.Tensor)  # it is copied from
    return rebuild(skeleton, tensors.borrowed if plain else tensors)


def _check(name: str, component: Any, state: Any, skeleton: Any) -> None:
    """Ask components that can tell without being changed, a loader for one, whether the state is theirs."""
    if hasattr(component, "check_state_dict"):
        if name.startswith(RESERVED) or not names_of_tensors(skeleton):
            component.check_state_dict(state)
    elif isinstance(component, torch.Tensor):
        if not isinstance(state, torch.Tensor) or state.shape != component.shape:
            raise Corrupt(f"{name} is a tensor of shape {tuple(component.shape)}, and saved is another thing")
    elif not hasattr(component, "load_state_dict"):
        check_puttable(component, state)


def _check_module(own: Mapping[str, Any], skeleton: Any, tensors: Shown) -> None:
    """Rebuild what is more than a tensor as it is: those were looked up when their shapes were compared."""
    for key, row in skeleton.get("$module", skeleton).items():
        if not isinstance(row, dict) or row.keys() != {"$tensor"}:
            found = rebuild(row, tensors)
            live = own[key]
            if not isinstance(live, torch.Tensor) or torch.nn.parameter.is_lazy(live):
                continue
            if not isinstance(found, torch.Tensor) or found.shape != live.shape:
                raise Corrupt(f"{key} is a tensor of shape {tuple(live.shape)}, and saved is another thing")


class Shown(LaidOut, Mapping[str, torch.Tensor]):
    """Tensors whose bytes may not be here yet, to see what they are."""

    def __init__(self, tensors: TensorViews) -> None:
        super().__init__()
        self.borrowed = tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.borrowed[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.borrowed)

    def __len__(self) -> int:
        return len(self.borrowed)

    def laid_out(self, row: dict[str, Any]) -> torch.Tensor:
        tensor: torch.Tensor = rebuild({key: value for key, value in row.items() if key != "stride"}, self)
        laid_out(tensor.to("meta"), row["stride"])  # or it says why not
        return tensor


class Undo:
    """Gives components their attributes back where a restore fails. Loading replaces attributes, as those of torch's
    optimizers, schedules and scalers do; what it changed within one stays."""

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
