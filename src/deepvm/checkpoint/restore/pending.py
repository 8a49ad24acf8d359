"""A parameter, or an optimizer's state, whose bytes have not arrived -> one whose first use waits for them (``lazy``).

A parameter stays the same object, and only its class changes meanwhile, to ``PendingParameter``. So uses of its
content wait, also those that no hook of a module sees: tied weights, a model that reaches into another module, the
broadcast when DDP is made. Functions of torch that ask no class, such as ``torch.tensor(parameter)`` and the
transforms of ``torch.func``, are the exception: docs/checkpoint.md lists them.
"""

from __future__ import annotations

import copy
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

Arrive = Callable[[torch.nn.Parameter], None]


def _functions_without_content() -> frozenset[Any]:
    """Return the functions of tensors that do not read their bytes."""
    tensor = torch.Tensor
    attributes = (
        "shape", "dtype", "device", "layout", "requires_grad", "grad", "is_leaf", "ndim", "grad_fn", "names",
        "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_mkldnn", "is_nested", "itemsize", "nbytes",
        "_version", "output_nr", "volatile", "retains_grad", "_backward_hooks", "_post_accumulate_grad_hooks",
    )  # fmt: skip
    methods = (
        "size", "dim", "numel", "nelement", "stride", "storage_offset", "is_contiguous", "element_size",
        "is_floating_point", "is_complex", "is_signed", "register_hook", "register_post_accumulate_grad_hook",
        "requires_grad_", "get_device", "__len__", "__hash__", "retain_grad", "is_inference", "ndimension",
    )  # fmt: skip
    found = set()
    for name in attributes:
        descriptor = getattr(tensor, name, None)
        for access in ("__get__", "__set__", "__delete__"):
            if hasattr(descriptor, access):
                found.add(getattr(descriptor, access))
    found.update(getattr(tensor, name) for name in methods if hasattr(tensor, name))
    found.update((torch.is_floating_point, torch.is_complex, torch.numel))
    return frozenset(found)


_WITHOUT_CONTENT = _functions_without_content()
_ARRIVE = "_deepvm_arrive"  # an attribute of the parameter


class PendingParameter(torch.nn.Parameter):
    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        if func not in _WITHOUT_CONTENT:
            uncompiled(_wait_all, _pending_among([*args, *(kwargs or {}).values()]))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        wait(self)
        return copy.deepcopy(self, memo)  # an ordinary parameter's

    def __reduce_ex__(self, protocol: Any) -> Any:
        wait(self)
        return self.__reduce_ex__(protocol)  # an ordinary parameter's


class OwnHook:
    """A hook of one module. Copies of the module have one that does nothing."""

    def __deepcopy__(self, _: object) -> Any:
        return _nothing

    def __reduce__(self) -> Any:
        return _no_hook, ()


class Hook(OwnHook):
    """Does something once a module under restore is used."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    def __call__(self, *_: object) -> None:
        uncompiled(self._work)

    __call__._torchdynamo_disable = True  # type: ignore[attr-defined]  # torch.compile runs it untraced


def _nothing(*_: object) -> None:
    pass


def _no_hook() -> Any:
    return _nothing


def attach(parameter: torch.nn.Parameter, arrive: Arrive) -> None:
    """Make the first use of a parameter call ``arrive``, which returns when its bytes have arrived."""
    setattr(parameter, _ARRIVE, arrive)
    parameter.__class__ = PendingParameter


def arrival_of(parameter: torch.nn.Parameter) -> Arrive | None:
    """Return what the first use of a pending parameter calls."""
    return parameter.__dict__.get(_ARRIVE)


def can_wait(tensor: object) -> bool:
    """True if it is a plain parameter whose memory bytes can be received into, and not of a derived class."""
    return (
        type(tensor) is torch.nn.Parameter
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
    )


def uncompiled(work: Callable[..., None], *arguments: Any) -> None:
    """Call a function that torch.compile must not trace."""
    if sys.modules.get("torch._dynamo") is None:  # importing it takes a second
        work(*arguments)
    else:
        _disabled()(work, *arguments)


@cache
def _disabled() -> Callable[..., None]:
    """Return a caller that is not traced. Making one takes longer than most calls, so it is made once."""

    def call(work: Callable[..., None], *arguments: Any) -> None:
        work(*arguments)

    found: Callable[..., None] = sys.modules["torch._dynamo"].disable(call)
    return found


def _wait_all(parameters: Iterable[torch.nn.Parameter]) -> None:
    for parameter in parameters:
        wait(parameter)


def wait(parameter: torch.nn.Parameter) -> None:
    """Wait for a pending parameter, and make it an ordinary one."""
    arrive = arrival_of(parameter)
    if arrive is not None:
        arrive(parameter)
    detach(parameter)


def detach(parameter: torch.nn.Parameter) -> None:
    """Make it an ordinary one, whether or not its bytes have arrived."""
    parameter.__dict__.pop(_ARRIVE, None)
    if type(parameter) is PendingParameter:
        parameter.__class__ = torch.nn.Parameter  # type: ignore[assignment]


def _pending_among(values: Iterable[Any]) -> list[PendingParameter]:
    found: list[PendingParameter] = []
    for value in values:
        if type(value) is PendingParameter:
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _pending_among(value)
        elif isinstance(value, dict):
            found += _pending_among(value.values())
    return found


_USES_OF_STATE = (
    "__getitem__", "__setitem__", "__delitem__", "__contains__", "__iter__", "__len__", "__eq__", "__ne__", "__repr__",
    "__or__", "__ror__", "__ior__", "__reversed__", "get", "setdefault", "pop", "popitem", "clear", "update", "keys",
    "values", "items", "copy",
)  # fmt: skip


class PendingState(defaultdict[Any, Any]):
    """Stands in for an optimizer's state: every use calls ``finish``, which loads it, and is passed on to that.

    So code that resets momentum before the first step works on what was restored, not on an empty mapping."""

    def __init__(self, optimizer: torch.optim.Optimizer, finish: Callable[[], None]) -> None:
        super().__init__(dict)
        self._optimizer, self._finish, self._before = optimizer, finish, optimizer.state

    def attach(self) -> None:
        self._optimizer.state = self

    def detach(self) -> bool:
        """Put back what was there before. False, and nothing changed, if the user has set another state."""
        if self._optimizer.state is not self:
            return False
        self._optimizer.state = self._before
        return True

    def loaded(self) -> Any:
        """Return the optimizer's state, and wait for it first if it has not arrived."""
        if self._optimizer.state is self:
            self._finish()
        return self._before if self._optimizer.state is self else self._optimizer.state

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.loaded(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.loaded().__reduce_ex__(protocol)


def _passed_on(name: str) -> Callable[..., Any]:
    def method(self: PendingState, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.loaded(), name)(*args, **kwargs)

    return method


for _name in _USES_OF_STATE:
    setattr(PendingState, _name, _passed_on(_name))
