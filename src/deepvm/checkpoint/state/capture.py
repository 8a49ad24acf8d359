"""The state's components -> its tensors and skeletons, quickly: what is as the last time is not walked again.

``state_dict()`` of a model with thousands of tensors takes longer than copying them. Modules and optimizers are
therefore walked only if anything that their ``state_dict()`` depends on has changed since the last time: names,
structure, hooks, classes, and each tensor's memory, type and layout. Everything else is walked at every save.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import attrgetter, itemgetter, methodcaller
from typing import Any, Protocol

import torch

from deepvm.checkpoint.buffers.off_heap import run_off_heap
from deepvm.checkpoint.buffers.tensor_marks import TensorMarks, numbers, stride_of
from deepvm.checkpoint.state.skeleton import Inline, Tensors, flatten
from deepvm.checkpoint.state.tensor_kinds import is_direct, own_stride
from deepvm.checkpoint.state.unwrapping import without_wrappers

_version, _values = attrgetter("_version"), methodcaller("values")


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


class _Plain:
    """Schedulers, loaders, counters, tensors: anything that is small, or of an unknown kind."""

    def __init__(self, name: str, component: Any) -> None:
        self._name, self._component = name, component
        self._specs: list[tuple[Any, ...]] = []

    def full(self, tensors: Tensors) -> str:
        text, own = self._flatten(tensors)
        self._specs = _specs(own)
        return text

    def again(self) -> tuple[str, dict[str, torch.Tensor]] | None:
        text, own = self._flatten(Tensors())
        return (text, own) if _specs(own) == self._specs else None

    def _flatten(self, tensors: Tensors) -> tuple[str, dict[str, torch.Tensor]]:
        before = len(tensors)
        part = self._component
        value = part.state_dict() if hasattr(part, "state_dict") else part
        if isinstance(part, torch.nn.Module):
            value = without_wrappers(part, value)
        tensors.usual = _usual_strides(part) if isinstance(part, torch.optim.Optimizer) else {}
        text = json.dumps(flatten(value, self._name, tensors), allow_nan=False)
        return text, dict(list(tensors.items())[before:])


def _specs(tensors: Mapping[str, torch.Tensor]) -> list[tuple[Any, ...]]:
    return [(name, t.dtype, t.shape, t.stride()) for name, t in tensors.items()]


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


_PLAIN_MODULE = {
    name: getattr(torch.nn.Module, name) for name in ("state_dict", "_save_to_state_dict", "get_extra_state")
}
_of_module = itemgetter(
    "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_state_dict_hooks", "_state_dict_pre_hooks"
)  # fmt: skip


def _is_plain(kind: type) -> bool:
    """True if torch itself makes the state of these modules."""
    return all(getattr(kind, name) is own for name, own in _PLAIN_MODULE.items())


class _Module:
    def __init__(self, name: str, module: torch.nn.Module) -> None:
        self._name, self._module = name, module

    @staticmethod
    def fits(component: Any) -> bool:
        """True if the state is parameters and buffers and nothing else."""
        found = _structure(list(component.modules())) if isinstance(component, torch.nn.Module) else None
        return found is not None and all(map(is_direct, found[1]))

    def full(self, tensors: Tensors) -> str:
        self._modules = list(self._module.modules())
        self._seen = _structure(self._modules)
        self._marks = TensorMarks([] if self._seen is None else self._seen[1])
        state = without_wrappers(self._module, self._module.state_dict())
        self._text = json.dumps(flatten(state, self._name, tensors), allow_nan=False)
        return self._text

    def again(self) -> tuple[str, dict[str, torch.Tensor]] | None:
        found = _structure(self._modules)
        if found is None or self._seen is None or found[0] != self._seen[0] or not self._marks.hold(found[1]):
            return None
        return self._text, {}


def _structure(modules: list[torch.nn.Module]) -> tuple[tuple[Any, ...], list[torch.Tensor]] | None:
    """Return all that the modules' ``state_dict()`` depends on, and their tensors; None if it may depend on more: on
    hooks, or on methods of the user's."""
    kinds, insides = list(map(type, modules)), list(map(vars, modules))
    if not all(map(_is_plain, set(kinds))) or any(
        "state_dict" in inside or "_save_to_state_dict" in inside or "get_extra_state" in inside for inside in insides
    ):
        return None
    parameters, buffers, children, hidden, hooks, pre_hooks = zip(*map(_of_module, insides), strict=True)
    if any(hooks) or any(pre_hooks):
        return None
    parts = (*parameters, *buffers, *children)
    tensors = list(chain.from_iterable(map(_values, (*parameters, *buffers))))
    found = (
        kinds,
        list(map(_version, modules)),
        list(map(len, parts)),
        list(chain.from_iterable(parts)),  # names
        numbers(id, chain.from_iterable(map(_values, children))),
        list(map(type, tensors)),
        [(i, frozenset(names)) for i, names in enumerate(hidden) if names],
    )
    return found, [t for t in tensors if t is not None]


class _Optimizer:
    def __init__(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        self._name, self._optimizer = name, optimizer

    @staticmethod
    def fits(component: Any) -> bool:
        return (
            isinstance(component, torch.optim.Optimizer)
            and _packs_plainly(component)
            and all(
                is_direct(value)
                for values in component.state.values()
                for value in (values.values() if isinstance(values, Mapping) else (values,))
                if isinstance(value, torch.Tensor)
            )
        )

    def full(self, tensors: Tensors) -> str:
        optimizer = self._optimizer
        state = optimizer.state_dict()
        self._numbers = [json.dumps(group["params"]) for group in state["param_groups"]]
        tensors.usual = _usual_strides(optimizer)
        self._state_text = json.dumps(flatten(state["state"], f"{self._name}.state", tensors), allow_nan=False)
        self._seen = _belongings(optimizer)
        self._marks = TensorMarks([] if self._seen is None else self._seen[1])
        return self._text(tensors)

    def again(self) -> tuple[str, dict[str, torch.Tensor]] | None:
        found = _belongings(self._optimizer) if _packs_plainly(self._optimizer) else None
        if found is None or self._seen is None or found[0] != self._seen[0] or not self._marks.hold(found[1]):
            return None
        tensors = Tensors()
        text = self._text(tensors)
        return None if tensors else (text, {})  # a learning rate that is a tensor: rare, so walk it again

    def _text(self, tensors: Tensors) -> str:
        groups = []
        for i, (group, params) in enumerate(zip(self._optimizer.param_groups, self._numbers, strict=True)):
            rest = {k: v for k, v in group.items() if k != "params"}
            text = json.dumps(flatten(rest, f"{self._name}.param_groups.{i}", tensors), allow_nan=False)
            groups.append(f'{text[:-1]}{", " if rest else ""}"params": {params}}}')
        return f'{{"state": {self._state_text}, "param_groups": [{", ".join(groups)}]}}'


_plain_state_dict = torch.optim.Optimizer.state_dict


def _packs_plainly(optimizer: torch.optim.Optimizer) -> bool:
    """True if torch itself makes its state_dict."""
    return (
        type(optimizer).state_dict is _plain_state_dict
        and "state_dict" not in vars(optimizer)
        and not optimizer._optimizer_state_dict_pre_hooks
        and not optimizer._optimizer_state_dict_post_hooks
    )


def _belongings(optimizer: torch.optim.Optimizer) -> tuple[tuple[Any, ...], list[torch.Tensor]] | None:
    """Return which parameter is in which group, with its strides, and what is kept for which: names and classes; and
    the kept tensors. None if something else than tensors is kept."""
    state, groups = optimizer.state, [group["params"] for group in optimizer.param_groups]
    if not _all_are(torch.Tensor, state) or not _all_are(Mapping, state.values()):
        return None
    kept = list(chain.from_iterable(map(_values, state.values())))
    if not _all_are(torch.Tensor, kept):
        return None
    parameters = list(chain.from_iterable(groups))
    found = (
        list(map(len, groups)),
        numbers(id, parameters),
        list(map(stride_of, parameters)),
        numbers(id, state),
        list(map(len, state.values())),
        list(chain.from_iterable(state.values())),
        list(map(type, kept)),
    )
    return found, kept


def _all_are(kind: type, values: Iterable[Any]) -> bool:
    return all(issubclass(found, kind) for found in set(map(type, values)))


class Capture:
    """Takes the state of components at each save."""

    def __init__(self) -> None:
        self._parts: dict[str, _Part] = {}
        self._components: list[tuple[str, int]] = []
        self._tensors: dict[str, torch.Tensor] = {}
        self._texts: dict[str, bytearray] = {}

    def take(self, components: Mapping[str, Any], before_comparing: Callable[[], None] = lambda: None) -> Captured:
        """``before_comparing`` is called when all code of the user's has run, if the components are the same."""
        known = [(name, id(component)) for name, component in components.items()]
        if known == self._components:
            found = self._again(before_comparing)
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

    def _again(self, before_comparing: Callable[[], None]) -> Captured | None:
        texts: dict[str, str] = {}
        replaced: dict[str, torch.Tensor] = {}
        plain = [name for name, part in self._parts.items() if isinstance(part, _Plain)]
        others = [name for name in self._parts if name not in plain]
        for name in [
            *plain,
            None,
            *others,
        ]:  # others' code may move the memory of modules, so these are compared after it
            if name is None:
                before_comparing()
                continue
            found = self._parts[name].again()
            if found is None:
                return None
            texts[name], tensors = found
            replaced.update(tensors)
        if not replaced.keys() <= self._tensors.keys():
            return None
        self._tensors.update(replaced)
        kept = {name: self._kept(name, texts[name]) for name in self._parts}
        return Captured(tensors=self._tensors, texts=kept, same=True, replaced=replaced)

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
