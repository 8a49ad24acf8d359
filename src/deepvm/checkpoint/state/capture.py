"""The state's components -> its tensors and skeletons, quickly: what is as the last time is not walked again.

``state_dict()`` of a model with thousands of tensors takes longer than copying them. Modules and optimizers are
therefore walked only if a tensor was replaced, or moved in memory, since the last time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Protocol

import torch

from deepvm.checkpoint.buffers.off_heap import run_off_heap
from deepvm.checkpoint.state.skeleton import Inline, Tensors, flatten
from deepvm.checkpoint.state.tensor_kinds import is_direct, own_stride
from deepvm.checkpoint.state.unwrapping import without_wrappers

_address = torch.Tensor.data_ptr


@dataclass(frozen=True)
class Captured:
    tensors: dict[str, torch.Tensor]
    texts: dict[str, bytearray]  # each component's skeleton, as JSON; until the next capture
    same: bool  # the tensors are the very same as at the last capture, but for those in ``replaced``
    replaced: dict[str, torch.Tensor]


class _Part(Protocol):
    def full(self, tensors: Tensors) -> str:
        """Flatten the component into ``tensors``; return its skeleton."""
        ...

    def again(self) -> tuple[str, dict[str, torch.Tensor]] | None:
        """Return the current skeleton, and tensors that are new objects under their old names; None if more has
        changed."""
        ...


def _marks(tensors: list[torch.Tensor]) -> tuple[list[Any], ...]:
    """Return what differs if a tensor was replaced, moved in memory, or got another shape."""
    same_memory = list(map(_address, tensors)), list(map(torch.Tensor.stride, tensors)), [t.shape for t in tensors]
    return list(map(id, tensors)), *same_memory


class _Plain:
    """Schedulers, loaders, counters, tensors: anything that is small, or of an unknown kind."""

    def __init__(self, name: str, component: Any) -> None:
        self._name, self._component = name, component
        self._specs: list[tuple[Any, ...]] = []

    def full(self, tensors: Tensors) -> str:
        text, own = self._flatten(tensors)
        self._specs = [(name, t.dtype, t.shape) for name, t in own.items()]
        return text

    def again(self) -> tuple[str, dict[str, torch.Tensor]] | None:
        text, own = self._flatten(Tensors())
        if [(name, t.dtype, t.shape) for name, t in own.items()] != self._specs:
            return None
        return text, own

    def _flatten(self, tensors: Tensors) -> tuple[str, dict[str, torch.Tensor]]:
        before = len(tensors)
        part = self._component
        value = part.state_dict() if hasattr(part, "state_dict") else part
        if isinstance(part, torch.nn.Module):
            value = without_wrappers(part, value)
        tensors.usual = _usual_strides(part) if isinstance(part, torch.optim.Optimizer) else {}
        text = json.dumps(flatten(value, self._name, tensors), allow_nan=False)
        return text, dict(list(tensors.items())[before:])


def _usual_strides(optimizer: torch.optim.Optimizer) -> dict[int, tuple[int, ...]]:
    """Return, by id, the strides of state whose parameter does not lie row by row: it lies as its parameter."""
    found = {}
    for parameter, values in optimizer.state.items():
        stride = own_stride(parameter) if isinstance(parameter, torch.Tensor) and is_direct(parameter) else None
        if stride is not None and isinstance(values, Mapping):
            alike = [v for v in values.values() if isinstance(v, torch.Tensor) and v.shape == parameter.shape]
            found.update({id(v): stride for v in alike})
    return found


class _Loader(_Plain):
    """A loader with a state of its own (torchdata's StatefulDataLoader), which differs between ranks."""

    def _flatten(self, _: Tensors) -> tuple[str, dict[str, torch.Tensor]]:
        return super()._flatten(Inline())


class _Module:
    def __init__(self, name: str, module: torch.nn.Module) -> None:
        self._name, self._module = name, module

    @staticmethod
    def fits(component: Any) -> bool:
        """True if the state is parameters and buffers and nothing else."""
        return isinstance(component, torch.nn.Module) and all(
            type(m).state_dict is torch.nn.Module.state_dict
            and type(m)._save_to_state_dict is torch.nn.Module._save_to_state_dict
            and type(m).get_extra_state is torch.nn.Module.get_extra_state
            and not m._state_dict_hooks
            and not m._state_dict_pre_hooks
            and all(t is None or is_direct(t) for t in chain(m._parameters.values(), m._buffers.values()))
            for m in component.modules()
        )

    def full(self, tensors: Tensors) -> str:
        self._modules = list(self._module.modules())
        self._children = self._child_ids()
        self._seen = _marks(self._tensors())
        state = without_wrappers(self._module, self._module.state_dict())
        self._text = json.dumps(flatten(state, self._name, tensors), allow_nan=False)
        return self._text

    def again(self) -> tuple[str, dict[str, torch.Tensor]] | None:
        if self._child_ids() != self._children or _marks(self._tensors()) != self._seen:
            return None
        return self._text, {}

    def _child_ids(self) -> list[int]:
        return list(map(id, chain.from_iterable(m._modules.values() for m in self._modules)))

    def _tensors(self) -> list[torch.Tensor]:
        parts = chain.from_iterable(chain(m._parameters.values(), m._buffers.values()) for m in self._modules)
        return [t for t in parts if t is not None]


class _Optimizer:
    def __init__(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        self._name, self._optimizer = name, optimizer

    @staticmethod
    def fits(component: Any) -> bool:
        return (
            isinstance(component, torch.optim.Optimizer)
            and type(component).state_dict is torch.optim.Optimizer.state_dict
            and not component._optimizer_state_dict_pre_hooks
            and not component._optimizer_state_dict_post_hooks
            and all(is_direct(v) for v in _state_values(component) if isinstance(v, torch.Tensor))
        )

    def full(self, tensors: Tensors) -> str:
        state = self._optimizer.state_dict()
        self._numbers = [json.dumps(group["params"]) for group in state["param_groups"]]
        tensors.usual = _usual_strides(self._optimizer)
        self._state_text = json.dumps(flatten(state["state"], f"{self._name}.state", tensors), allow_nan=False)
        values = _state_values(self._optimizer)
        self._only_tensors = all(isinstance(v, torch.Tensor) for v in values)
        self._seen = _marks(values) if self._only_tensors else ()
        self._params = self._param_ids()
        return self._text(tensors)

    def again(self) -> tuple[str, dict[str, torch.Tensor]] | None:
        values = _state_values(self._optimizer)
        if not self._only_tensors or self._param_ids() != self._params or list(map(id, values)) != self._seen[0]:
            return None
        if _marks(values) != self._seen:
            return None
        tensors = Tensors()
        text = self._text(tensors)
        return None if tensors else (text, {})  # a learning rate that is a tensor: rare, so walk it again

    def _param_ids(self) -> list[int]:
        return list(map(id, chain.from_iterable(group["params"] for group in self._optimizer.param_groups)))

    def _text(self, tensors: Tensors) -> str:
        groups = []
        for i, (group, numbers) in enumerate(zip(self._optimizer.param_groups, self._numbers, strict=True)):
            rest = {k: v for k, v in group.items() if k != "params"}
            text = json.dumps(flatten(rest, f"{self._name}.param_groups.{i}", tensors), allow_nan=False)
            groups.append(f'{text[:-1]}{", " if rest else ""}"params": {numbers}}}')
        return f'{{"state": {self._state_text}, "param_groups": [{", ".join(groups)}]}}'


def _state_values(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return what it keeps for its parameters: the values of each mapping, or what it has instead of one."""
    found = (values.values() if isinstance(values, Mapping) else (values,) for values in optimizer.state.values())
    return list(chain.from_iterable(found))


class Capture:
    """Takes the state of components at each save."""

    def __init__(self) -> None:
        self._parts: dict[str, _Part] = {}
        self._components: list[tuple[str, int]] = []
        self._tensors: dict[str, torch.Tensor] = {}
        self._texts: dict[str, bytearray] = {}

    def take(self, components: Mapping[str, Any]) -> Captured:
        known = [(name, id(component)) for name, component in components.items()]
        if known == self._components:
            found = self._again()
            if found is not None:
                return found
        self._components = []  # until all of it is captured: a part may raise
        self._parts = {name: _part(name, component) for name, component in components.items()}
        tensors, texts = Tensors(), {}
        for name, part in self._parts.items():
            text = part.full(tensors) if isinstance(part, _Plain) else run_off_heap(partial(part.full, tensors))
            texts[name] = self._kept(name, text)
        self._tensors, self._components = tensors, known
        return Captured(tensors=self._tensors, texts=texts, same=False, replaced={})

    def _again(self) -> Captured | None:
        texts: dict[str, bytearray] = {}
        replaced: dict[str, torch.Tensor] = {}
        for name, part in self._parts.items():
            found = part.again()
            if found is None:
                return None
            text, tensors = found
            texts[name] = self._kept(name, text)
            replaced.update(tensors)
        if not replaced.keys() <= self._tensors.keys():
            return None
        self._tensors.update(replaced)
        return Captured(tensors=self._tensors, texts=texts, same=True, replaced=replaced)

    def _kept(self, name: str, text: str) -> bytearray:
        """Return the text in memory that is kept from save to save. New memory would lie in the middle of the trainer's
        heap until it is sent, and a large activation would no longer fit there."""
        kept = self._texts.setdefault(name, bytearray())
        kept[:] = text.encode()
        return kept


def _part(name: str, component: Any) -> _Part:
    if _Module.fits(component):
        return _Module(name, component)
    if _Optimizer.fits(component):
        return _Optimizer(name, component)
    if isinstance(component, torch.utils.data.DataLoader):
        return _Loader(name, component)
    return _Plain(name, component)


def join(texts: Mapping[str, bytearray]) -> str:
    """Join the components' texts into one rank's skeleton."""
    return "{" + ", ".join(f"{json.dumps(name)}: {text.decode()}" for name, text in texts.items()) + "}"
