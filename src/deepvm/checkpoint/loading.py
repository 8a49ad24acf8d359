"""A state's tensors and skeleton into the components that it is of. Nothing is changed before all of it fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch

from deepvm.checkpoint.layout import ALIGNED_BYTES, DTYPES, Layout
from deepvm.checkpoint.parameters import ByParameter, is_compiled, load_rest, owns_memory, plain_parameters
from deepvm.checkpoint.staging import Staging
from deepvm.checkpoint.state import names_of_tensors, rebuild
from deepvm.errors import CheckpointError, Corrupt

RESERVED = "deepvm."  # components of our own: a checkpoint may have them, or not


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether it lies as torch lays its own tensors, so that it can be computed with as fast as with those."""
    return tensor.data_ptr() % ALIGNED_BYTES == 0


class TensorsIn(Mapping[str, torch.Tensor]):
    """Every tensor of a checkpoint, as a view of the memory that holds it, or will; made when it is asked for."""

    def __init__(self, memory: Staging, layout: Layout) -> None:
        self.memory, self._layout = memory, layout
        self._made: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        found = self._made.get(name)
        if found is None:
            found = self._made[name] = self._made_by(self.memory.tensor, name)
        return found

    def lasting(self, name: str) -> torch.Tensor:
        """One for whoever keeps it when the others go."""
        return self._made_by(self.memory.lasting_tensor, name)

    def _made_by(self, make: Callable[[int, torch.dtype, tuple[int, ...]], torch.Tensor], name: str) -> torch.Tensor:
        entry = self._layout.entries[self._layout.by_name[name]]
        return make(entry.start, DTYPES[entry.dtype], entry.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout.by_name)

    def __len__(self) -> int:
        return len(self._layout.by_name)


def load(components: dict[str, Any], tensors: TensorsIn, skeleton: Mapping[str, Any]) -> None:
    """Give every component its state, which was checked to be of it, and the system what no component kept. Parameters
    keep only what is memory as good as theirs: they are written to in every step."""
    adopted = Adopted(tensors)
    given = _give_memory(components, skeleton, adopted) if tensors.memory.own else set()
    for name in components:
        if name in skeleton:
            load_component(components, name, skeleton[name], adopted, given)
    adopted.release_others()


def load_component(
    components: dict[str, Any], name: str, skeleton: Any, adopted: Adopted, given: Collection[int] = ()
) -> None:
    """``given`` are the ids of parameters that have their bytes already."""
    component = components[name]
    if isinstance(component, torch.nn.Module):  # copies into its own tensors
        load_rest(component, rebuild(skeleton, adopted.borrowed), given)
        return
    state = rebuild(skeleton, adopted)  # others keep what they are given
    if hasattr(component, "load_state_dict"):
        component.load_state_dict(state)
    elif isinstance(component, torch.Tensor):
        with torch.no_grad():
            component.copy_(state)
    else:
        components[name] = state


def _give_memory(components: Mapping[str, Any], skeleton: Mapping[str, Any], adopted: Adopted) -> set[int]:
    """Let parameters use the memory that came with the checkpoint in the place of their own, as Module.to() does; the
    ids of those that do. A copy stays where memory has others that look at it, now or after this restore."""
    parts = Counter(name for part in components for name in names_of_tensors(skeleton.get(part)))
    found: ByParameter = {}
    for name, component in components.items():
        if isinstance(component, torch.nn.Module) and not is_compiled(component):
            found.update(plain_parameters(component, skeleton[name], adopted.borrowed))
    takers = Counter(name for _, name in found.values())
    given: set[int] = set()
    for parameter, name in found.values():
        alone = parts[name] == takers[name] == 1
        if alone and is_aligned(adopted.borrowed[name]) and owns_memory(parameter):
            parameter.data = adopted[name]
            given.add(id(parameter))
    return given


class Adopted(dict[str, torch.Tensor]):
    """Tensors that belong to whoever asks for them. Memory that came with a checkpoint is not copied again where it
    can serve as it is; tied tensors stay tied."""

    def __init__(self, tensors: TensorsIn) -> None:
        super().__init__()
        self.borrowed = tensors

    def __missing__(self, name: str) -> torch.Tensor:
        tensor = self.borrowed[name]
        self[name] = self.borrowed.lasting(name) if is_aligned(tensor) else tensor.clone()
        return self[name]

    def release_others(self) -> None:
        """Give back the memory of all that nobody kept."""
        kept = [(t.data_ptr(), t.nbytes) for name, t in self.items() if t.data_ptr() == self.borrowed[name].data_ptr()]
        self.borrowed.memory.release_all_but(kept)


def check(components: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], skeleton: Mapping[str, Any]) -> None:
    """That the checkpoint is of these components."""
    missing = sorted(name for name in components.keys() - skeleton.keys() if not name.startswith(RESERVED))
    if missing:
        saved = ", ".join(sorted(name for name in skeleton if not name.startswith(RESERVED)))
        raise CheckpointError(f"the checkpoint has no state of {', '.join(missing)}; it has {saved}")
    _check_modules(components, skeleton, tensors)
    _check_optimizers(components, skeleton)
    for name, component in components.items():
        found = skeleton.get(name)
        if hasattr(component, "check_state_dict") and found is not None and not names_of_tensors(found):
            component.check_state_dict(rebuild(found, tensors))  # a loader can tell without being changed


def _check_optimizers(components: Mapping[str, Any], skeleton: Mapping[str, Any]) -> None:
    for name, component in components.items():
        if not isinstance(component, torch.optim.Optimizer):
            continue
        saved = skeleton[name].get("param_groups") if isinstance(skeleton[name], dict) else None
        if not isinstance(saved, list):
            continue  # of a kind that has its own idea of a state
        mine, theirs = ([len(group["params"]) for group in groups] for groups in (component.param_groups, saved))
        if mine != theirs:
            raise CheckpointError(
                f"the checkpoint is of another optimizer: {name} has groups of {mine} parameters, saved {theirs}"
            )


def _check_modules(
    components: Mapping[str, Any], skeleton: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> None:
    problems: list[str] = []
    for name, component in components.items():
        if not isinstance(component, torch.nn.Module):
            continue
        try:
            saved = rebuild(skeleton[name], tensors)
        except (KeyError, TypeError, AttributeError) as error:
            raise Corrupt(f"the saved state of {name} cannot be read: {error}") from None
        if not isinstance(saved, Mapping):
            raise Corrupt(f"the saved state of {name} cannot be read: it is a {type(saved).__name__}")
        own = component.state_dict()
        problems += [f"{name}.{key} is not in the checkpoint" for key in own if key not in saved]
        problems += [f"{name}.{key} is not in the model" for key in saved if key not in own]
        problems += [
            f"{name}.{key} is {tuple(own[key].shape)}, saved {tuple(saved[key].shape)}"
            for key in own
            if key in saved and isinstance(own[key], torch.Tensor) and own[key].shape != saved[key].shape
        ]
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise CheckpointError(f"the checkpoint is of another model: {'; '.join(problems[:8])}{more}")
