"""A state's tensors and skeleton into the components that it is of. Nothing is changed before all of it fits."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import suppress
from typing import Any

import torch

from deepvm.checkpoint.buffers.priority import lower_priority
from deepvm.checkpoint.restore.parameters import ByParameter, is_compiled, load_rest, owns_memory, plain_parameters
from deepvm.checkpoint.restore.rehearsal import Undo, prepare
from deepvm.checkpoint.restore.selection import Selection
from deepvm.checkpoint.restore.tensor_views import LASTING_BYTES, TensorViews, is_aligned
from deepvm.checkpoint.state.fill import fill, put
from deepvm.checkpoint.state.skeleton import LaidOut, names_of_tensors
from deepvm.checkpoint.state.tensor_kinds import fill_expanded, is_expanded


def load(selected: Selection, tensors: TensorViews) -> None:
    """Give every component its state, which was checked to be of it, and the system what no component kept. Parameters
    keep only what is memory as good as theirs: they are written to in every step."""
    adopted = OwnedTensors(tensors)
    ready = prepare(selected, adopted)
    with Undo() as undo:
        for name, state in ready.items():
            load_component(selected, name, state, undo)
        given, replaced = _give_memory(selected, adopted) if tensors.memory.own else (set(), [])
        for name, own in selected.own.items():
            load_rest(selected.components[name], own, selected.skeleton[name], tensors, given)
    adopted.release_others()
    if replaced:
        with suppress(RuntimeError):  # no thread more: then they go with this call
            threading.Thread(target=_let_go, args=(replaced,), name="deepvm-release", daemon=True).start()


def _let_go(replaced: list[torch.Tensor]) -> None:
    """Drop tensors that nobody else has, one by one: to give their pages back takes a while."""
    lower_priority()
    while replaced:
        replaced.pop()


def load_component(selected: Selection, name: str, state: Any, undo: Undo) -> None:
    """Give a component that is no module its rebuilt state."""
    component = selected.components[name]
    if hasattr(component, "load_state_dict"):
        undo.keep(component)
        component.load_state_dict(state)  # it keeps what it is given
    elif isinstance(component, torch.Tensor):
        _fill(component, state)
    else:
        selected.components[name] = put(component, state)


def _fill(component: torch.Tensor, saved: torch.Tensor) -> None:
    with torch.no_grad():
        if is_expanded(component):
            fill_expanded(component, saved)
        elif not fill(component, saved):
            component.copy_(saved)  # of another type


def _give_memory(selected: Selection, adopted: OwnedTensors) -> tuple[set[int], list[torch.Tensor]]:
    """Let parameters use the memory that came with the checkpoint in the place of their own, as Module.to() does; the
    ids of those that do, and what they had. A copy stays where memory has others that look at it, now or after this
    restore, and where the copy takes no time to speak of."""
    parts = Counter(name for skeleton in selected.skeleton.values() for name in names_of_tensors(skeleton))
    found: ByParameter = {}
    for name, own in selected.own.items():
        module = selected.components[name]
        if not is_compiled(module):
            found.update(plain_parameters(module, own, selected.skeleton[name], adopted.borrowed))
    takers = Counter(name for _, name in found.values())
    given: set[int] = set()
    replaced: list[torch.Tensor] = []
    for parameter, name in found.values():
        if parameter.nbytes < LASTING_BYTES:
            continue
        alone = parts[name] == takers[name] == 1
        if alone and is_aligned(adopted.borrowed[name]) and owns_memory(parameter):
            replaced.append(parameter.data)
            parameter.data = adopted[name]
            given.add(id(parameter))
    return given, replaced


class OwnedTensors(LaidOut, dict[str, torch.Tensor]):
    """Tensors that belong to whoever asks for them. Memory that came with a checkpoint is not copied again where it
    can serve as it is; tied tensors stay tied."""

    def __init__(self, tensors: TensorViews) -> None:
        super().__init__()
        self.borrowed = tensors
        self._lasting: list[torch.Tensor] = []

    def __missing__(self, name: str) -> torch.Tensor:
        tensor = self.borrowed[name]
        if tensor.nbytes < LASTING_BYTES or not is_aligned(tensor):
            found = tensor.clone()
        else:
            found = self.borrowed.owning(name)
            self._lasting.append(found)
        self[name] = found
        return found

    def forget(self) -> None:
        """Keep nothing: all have what is theirs."""
        self.clear()
        self._lasting.clear()
        self.forget_copies()

    def release_others(self) -> None:
        """Give back the memory of all that nobody kept."""
        self.borrowed.release_all_but([(t.data_ptr(), t.nbytes) for t in self._lasting])
