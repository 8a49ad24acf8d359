"""A checkpoint's tensors and skeleton -> the live components, all at once, after ``validation`` has checked them."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import suppress
from typing import Any

import torch

from deepvm.checkpoint.buffers.priority import lower_priority
from deepvm.checkpoint.restore.parameters import (
    ByParameter,
    is_compiled,
    load_rest,
    loads_plainly,
    owns_memory,
    plain_parameters,
)
from deepvm.checkpoint.restore.selection import Selection
from deepvm.checkpoint.restore.tensor_views import KEEP_BYTES, TensorViews, is_aligned
from deepvm.checkpoint.restore.validation import Undo, prepare
from deepvm.checkpoint.state.fill import fill, put
from deepvm.checkpoint.state.skeleton import LaidOut, names_of_tensors
from deepvm.checkpoint.state.tensor_kinds import fill_expanded, is_expanded


def load(selected: Selection, tensors: TensorViews) -> None:
    """Load every component, and free the memory that none kept. Parameters keep only memory as good as their own: every
    step writes to it. What may refuse its state comes first; plain values, which cannot, come last."""
    owned = OwnedTensors(tensors)
    ready = prepare(selected, owned)
    custom, plain = by_loading(selected)
    with Undo() as undo:
        for name, state in ready.items():
            if hasattr(selected.components[name], "load_state_dict"):
                load_component(selected, name, state, undo)
        for name in custom:
            load_rest(selected.components[name], selected.own[name], selected.skeleton[name], tensors, ())
        adopted, replaced = _adopt_memory(selected, owned) if tensors.memory.own else (set(), [])
        for name in plain:
            load_rest(selected.components[name], selected.own[name], selected.skeleton[name], tensors, adopted)
        for name, state in ready.items():
            if not hasattr(selected.components[name], "load_state_dict"):
                load_component(selected, name, state, undo)
    owned.release_others()
    if replaced:
        with suppress(RuntimeError):  # no thread can be started: then this call frees them
            threading.Thread(target=_free, args=(replaced,), name="deepvm-release", daemon=True).start()


def by_loading(selected: Selection) -> tuple[list[str], list[str]]:
    """Return the modules whose own loading may refuse a state, and those of which only tensors are filled."""
    custom = [name for name in selected.own if not loads_plainly(selected.components[name])]
    return custom, [name for name in selected.own if name not in custom]


def _free(replaced: list[torch.Tensor]) -> None:
    """Drop the last references to tensors, one by one: unmapping their pages takes a while."""
    lower_priority()
    while replaced:
        replaced.pop()


def load_component(selected: Selection, name: str, state: Any, undo: Undo) -> None:
    """Load the rebuilt state of a component that is not a module."""
    component = selected.components[name]
    if hasattr(component, "load_state_dict"):
        undo.keep(component)
        component.load_state_dict(state)
    elif not isinstance(component, torch.Tensor):
        selected.components[name] = put(component, state)
    else:
        with torch.no_grad():
            if is_expanded(component):
                fill_expanded(component, state)
            elif not fill(component, state):
                component.copy_(state)  # of another type


def _adopt_memory(selected: Selection, owned: OwnedTensors) -> tuple[set[int], list[torch.Tensor]]:
    """Let parameters use the checkpoint's memory instead of their own, as Module.to() does. Returns their ids and the
    memory they had. Small ones are copied, and those whose memory has other users, now or after this restore."""
    parts = Counter(name for skeleton in selected.skeleton.values() for name in names_of_tensors(skeleton))
    found: ByParameter = {}
    for name, own in selected.own.items():
        module = selected.components[name]
        if not is_compiled(module):
            found.update(plain_parameters(module, own, selected.skeleton[name], owned.views))
    takers = Counter(name for _, name in found.values())
    adopted: set[int] = set()
    replaced: list[torch.Tensor] = []
    for parameter, name in found.values():
        if parameter.nbytes < KEEP_BYTES:
            continue
        alone = parts[name] == takers[name] == 1
        if alone and is_aligned(owned.views[name]) and owns_memory(parameter):
            replaced.append(parameter.data)
            parameter.data = owned[name]
            adopted.add(id(parameter))
    return adopted, replaced


class OwnedTensors(LaidOut, dict[str, torch.Tensor]):
    """Tensors for components to keep. They are copied only if small or not aligned; tied tensors stay tied."""

    def __init__(self, views: TensorViews) -> None:
        super().__init__()
        self.views = views
        self._kept: list[torch.Tensor] = []

    def __missing__(self, name: str) -> torch.Tensor:
        tensor = self.views[name]
        if tensor.nbytes < KEEP_BYTES or not is_aligned(tensor):
            found = tensor.clone()
        else:
            found = self.views.owning(name)
            self._kept.append(found)
        self[name] = found
        return found

    def forget(self) -> None:
        """Drop all references: the components hold the tensors."""
        self.clear()
        self._kept.clear()
        self.forget_copies()

    def release_others(self) -> None:
        """Free the memory that no component keeps."""
        self.views.release_all_but([(t.data_ptr(), t.nbytes) for t in self._kept])
