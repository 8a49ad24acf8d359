"""The optimizers of a running script -> its state as a Checkpointer would save it, and the sizes of that.

A script with a Checkpointer has named its state. Of any other, the state is the optimizers that step, and the modules
that own their parameters: the outermost ones that exist, so that buffers and frozen layers are included.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
import xxhash

from deepvm.checkpoint.checkpointer import Checkpointer
from deepvm.checkpoint.determinism.component import DETERMINISM, Determinism
from deepvm.checkpoint.restore.use_order import USE_ORDER, UseOrder
from deepvm.checkpoint.snapshot.file_size import FileSize, file_size, owner_of
from deepvm.checkpoint.state.owners import inner_optimizer

HEADER = "header"  # the component of a job for what a file has beside the state's tensors
PARAMETERS = "parameters"  # tensors that an optimizer holds and no module owns


class FoundState:
    """A script's state. It is read again for each size: components and tensors may have been replaced."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], checkpointer: Checkpointer | None) -> None:
        self._checkpointer, self.optimizers = checkpointer, list(optimizers)
        state = _of_optimizers(self.optimizers) if checkpointer is None else dict(checkpointer.state)
        self.modules = [part for part in state.values() if isinstance(part, torch.nn.Module)]
        if checkpointer is not None and not self.modules:  # a state of tensors: the parameters are the optimizers'
            self.modules = _roots(self.optimizers)
        self._state = state
        # Every checkpoint has these two; they observe the steps that follow
        self._own: dict[str, Determinism | UseOrder] = {}
        if checkpointer is None:
            self._own = {DETERMINISM: Determinism(state, 0, 1), USE_ORDER: UseOrder(state)}

    def components(self) -> Mapping[str, Any]:
        if self._checkpointer is not None:
            return self._checkpointer.components()
        return {**self._state, **self._own}

    def close(self) -> None:
        for part in self._own.values():
            part.close()

    @property
    def optimized(self) -> list[torch.Tensor]:
        """The parameters that the optimizers train, each once."""
        held = (p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"])
        return [p for p in _each_once(held) if p.requires_grad]

    @property
    def parameters(self) -> list[torch.Tensor]:
        """All parameters, frozen ones too, each once."""
        owned = (p for module in self.modules for p in module.parameters())
        held = [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]
        return _each_once([*owned, *held])

    @property
    def buffers(self) -> list[torch.Tensor]:
        return _each_once(b for module in self.modules for b in module.buffers())

    @property
    def optimizer_bytes(self) -> int:
        """The bytes of the tensors in the optimizers' state."""
        return sum(map(tensor_bytes, _each_once(_tensors_in([o.state for o in self.optimizers]))))

    def size(self) -> StateSize:
        """Return what a save would write now. CheckpointError if the state cannot be saved as it is."""
        return StateSize(file_size(self.components()))


class StateSize:
    """The bytes of a save by component, and a fingerprint of each tensor, by which a later save is compared."""

    def __init__(self, found: FileSize) -> None:
        self._found = found
        self._digests = {name: _digest(tensor) for name, tensor in found.tensors.items()}
        self._bytes = {name: tensor_bytes(tensor) for name, tensor in found.tensors.items()}

    def by_component(self, before: StateSize) -> dict[str, tuple[int, int]]:
        """Return the bytes of each component, and of these the bytes of tensors that changed since ``before``."""
        names = list(self._found.component_bytes)
        changed = dict.fromkeys(names, 0)
        for tensor, digest in self._digests.items():
            if before._digests.get(tensor) != digest:
                changed[owner_of(tensor, names)] += self._bytes[tensor]
        rows = {
            name: (size, min(size, changed[name]))
            for name, size in self._found.component_bytes.items()
            if name not in (DETERMINISM, USE_ORDER)
        }
        own = sum(self._found.component_bytes.get(name, 0) for name in (DETERMINISM, USE_ORDER))
        header = self._found.header_bytes + own  # generators and plain values change with each step
        return {**rows, _unused(HEADER, rows): (header, header)}


def estimate(found: FoundState) -> dict[str, tuple[int, int | None]]:
    """Return the sizes of a state that a Checkpointer cannot save as it is, such as FSDP's shards."""
    model = sum(map(tensor_bytes, [*found.parameters, *found.buffers]))
    return {"model": (model, None), "optimizer": (found.optimizer_bytes, None)}


def tensor_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _digest(tensor: torch.Tensor) -> int:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if not flat.numel():
        return 0
    data: Any = flat.view(torch.uint8).numpy()
    return xxhash.xxh3_64_intdigest(memoryview(data))


def _of_optimizers(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    roots = _roots(optimizers)
    owned = {id(p) for root in roots for p in root.parameters()}
    held = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    loose = [p for p in _each_once(held) if id(p) not in owned]
    state: dict[str, Any] = dict(zip(_names("model", roots), roots, strict=True))
    state |= dict(zip(_names("optimizer", optimizers), optimizers, strict=True))
    if loose:
        state[_unused(PARAMETERS, state)] = loose
    return state


def _roots(optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.nn.Module]:
    """Return the outermost modules with parameters that these optimizers hold, in the order of the parameters."""
    # By type(), since isinstance() asks for __class__, which lazy objects of other libraries compute
    modules = [one for one in gc.get_objects() if issubclass(type(one), torch.nn.Module)]
    modules = [one for one in modules if "_parameters" in vars(one) and "_modules" in vars(one)]
    parents: dict[int, list[torch.nn.Module]] = {}
    for module in modules:
        for child in vars(module)["_modules"].values():
            parents.setdefault(id(child), []).append(module)
    owners = {id(p): m for m in reversed(modules) for p in vars(m)["_parameters"].values() if p is not None}
    held = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    roots: dict[int, torch.nn.Module] = {}
    for owner in [owners[id(p)] for p in held if id(p) in owners]:
        seen: set[int] = set()
        waiting = [owner]
        while waiting:
            one = waiting.pop()
            if id(one) in seen:
                continue
            seen.add(id(one))
            above = parents.get(id(one), [])
            waiting += above
            if not above:
                roots[id(one)] = one
    return _largest(list(roots.values()))


def _largest(roots: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Drop modules whose parameters another one has, too: a model, and a container of parts of it."""
    held = {id(root): {id(p) for p in root.parameters()} for root in roots}
    kept: list[torch.nn.Module] = []
    for root in sorted(roots, key=lambda one: -len(held[id(one)])):  # stable
        if not any(held[id(root)] <= held[id(other)] for other in kept):
            kept.append(root)
    return [root for root in roots if any(root is one for one in kept)]


def _names(kind: str, parts: Sequence[Any]) -> list[str]:
    """Name one part by its kind, several by the variables that the script has for them, else by number."""
    if len(parts) == 1:
        return [kind]
    names: list[str] = []
    for number, part in enumerate(parts, start=1):
        name = _variable(part) or f"{kind}{number}"
        names.append(name if name not in names else f"{kind}{number}")
    return names


def _variable(part: Any) -> str | None:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if not str(frame.f_globals.get("__name__", "")).startswith(("deepvm.", "torch.")):
            for name, value in [*frame.f_locals.items(), *frame.f_globals.items()]:
                if value is part or (inner_optimizer(value) is part if hasattr(value, "param_groups") else False):
                    return name if not name.startswith("_") else None
        frame = frame.f_back
    return None


def _unused(name: str, taken: Mapping[str, Any]) -> str:
    return name if name not in taken else _unused(f"{name}_", taken)


def _each_once(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def _tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for part in value.values() for tensor in _tensors_in(part)]
    return [tensor for part in value for tensor in _tensors_in(part)] if isinstance(value, list | tuple) else []
