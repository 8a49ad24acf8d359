"""A state's tensors and skeleton into the components that it is of. Nothing is changed before all of it fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

import torch

from deepvm.checkpoint.in_place import fill, put
from deepvm.checkpoint.optimizer_state import load_optimizer
from deepvm.checkpoint.parameters import ByParameter, is_compiled, load_rest, owns_memory, plain_parameters
from deepvm.checkpoint.selection import Selection
from deepvm.checkpoint.state import LaidOut, names_of_tensors, rebuild
from deepvm.checkpoint.tensor_kinds import fill_expanded, is_expanded
from deepvm.checkpoint.tensor_memory import LASTING_BYTES, TensorsIn, is_aligned


def check(selected: Selection, tensors: Mapping[str, torch.Tensor]) -> None:
    """Ask components that can tell without being changed, a loader for one, whether the state is theirs."""
    for name, component in selected.components.items():
        found = selected.skeleton[name]
        if hasattr(component, "check_state_dict") and not names_of_tensors(found):
            component.check_state_dict(rebuild(found, tensors))


def load(selected: Selection, tensors: TensorsIn) -> None:
    """Give every component its state, which was checked to be of it, and the system what no component kept. Parameters
    keep only what is memory as good as theirs: they are written to in every step."""
    adopted = Adopted(tensors)
    given = _give_memory(selected, adopted) if tensors.memory.own else set()
    for name in selected.components:
        load_component(selected, name, adopted, given)
    adopted.release_others()


def load_component(selected: Selection, name: str, adopted: Adopted, given: Collection[int] = ()) -> None:
    """``given`` are the ids of parameters that have their bytes already."""
    component, skeleton = selected.components[name], selected.skeleton[name]
    if isinstance(component, torch.nn.Module):  # copies into its own tensors
        load_rest(component, selected.own[name], skeleton, adopted.borrowed, given)
    elif isinstance(component, torch.optim.Optimizer):
        load_optimizer(component, skeleton, adopted, adopted.borrowed)
    elif hasattr(component, "load_state_dict"):
        component.load_state_dict(rebuild(skeleton, adopted))  # it keeps what it is given
    elif isinstance(component, torch.Tensor):
        _fill(component, rebuild(skeleton, adopted.borrowed))
    else:
        selected.components[name] = put(component, rebuild(skeleton, adopted))


def _fill(component: torch.Tensor, saved: torch.Tensor) -> None:
    with torch.no_grad():
        if is_expanded(component):
            fill_expanded(component, saved)
        elif not fill(component, saved):
            component.copy_(saved)  # of another type


def _give_memory(selected: Selection, adopted: Adopted) -> set[int]:
    """Let parameters use the memory that came with the checkpoint in the place of their own, as Module.to() does; the
    ids of those that do. A copy stays where memory has others that look at it, now or after this restore, and where the
    copy takes no time to speak of."""
    parts = Counter(name for skeleton in selected.skeleton.values() for name in names_of_tensors(skeleton))
    found: ByParameter = {}
    for name, own in selected.own.items():
        module = selected.components[name]
        if not is_compiled(module):
            found.update(plain_parameters(module, own, selected.skeleton[name], adopted.borrowed))
    takers = Counter(name for _, name in found.values())
    given: set[int] = set()
    for parameter, name in found.values():
        if parameter.nbytes < LASTING_BYTES:
            continue
        alone = parts[name] == takers[name] == 1
        if alone and is_aligned(adopted.borrowed[name]) and owns_memory(parameter):
            parameter.data = adopted[name]
            given.add(id(parameter))
    return given


class Adopted(LaidOut, dict[str, torch.Tensor]):
    """Tensors that belong to whoever asks for them. Memory that came with a checkpoint is not copied again where it
    can serve as it is; tied tensors stay tied."""

    def __init__(self, tensors: TensorsIn) -> None:
        super().__init__()
        self.borrowed = tensors
        self._lasting: list[torch.Tensor] = []

    def __missing__(self, name: str) -> torch.Tensor:
        tensor = self.borrowed[name]
        if tensor.nbytes < LASTING_BYTES or not is_aligned(tensor):
            found = tensor.clone()
        else:
            found = self.borrowed.lasting(name)
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
