"""One training step -> its FLOPs, operations, the bytes that these read and write, and the activations that it keeps.

``job.watch`` counts the steps of a script with it, ``models.dry_run`` those of a model without data. Both count alike:
the roofline is fitted to these figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))  # type: ignore[no-untyped-call]


def _convolution_backward(
    grad: Any, inputs: Any, weight: Any, _bias: Any, _stride: Any, _padding: Any, _dilation: Any, transposed: bool,
    _output_padding: Any, _groups: int, wanted: Sequence[bool], **_: Any,
) -> int:  # fmt: skip
    """The gradients of input and weight take as much as the forward pass each."""
    return int(conv_flop_count(list(inputs), list(weight), list(grad), transposed=transposed)) * sum(wanted[:2])


# torch has no formula for attention on a CPU, and its own for convolutions is for one group: a depthwise one would
# count as many times as it has channels.
_FORMULAS = {
    aten.convolution_backward: _convolution_backward,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


class StepCounter:
    """Counts between ``start`` and ``stop``, which an optimizer's hook may call: not a block of a script's code."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        """``parameters`` are in memory all the time, and so no activations."""
        self._flops = FlopCounterMode(display=False, custom_mapping=_FORMULAS)
        self._traffic = _Traffic()
        self._activations = _Activations(parameters)
        self._entered = ExitStack()

    def start(self) -> None:
        with ExitStack() as entering:
            for counter in (self._flops, self._traffic, self._activations):
                entering.enter_context(counter)
            self._entered = entering.pop_all()

    def stop(self) -> None:
        self._entered.close()

    @property
    def flops(self) -> float:
        return float(self._flops.get_total_flops())

    @property
    def traffic_bytes(self) -> int:
        """As if every operation read its inputs from memory and wrote its result there: an upper bound."""
        return self._traffic.bytes

    @property
    def operations(self) -> int:
        return self._traffic.operations

    @property
    def activation_bytes(self) -> int:
        """The most that autograd kept for the backward pass at any time."""
        return self._activations.peak_bytes


# Beside views, which torch marks as such.
_MOVE_NOTHING = {aten.detach.default, aten._unsafe_view.default, aten.empty.memory_format}


class _Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func not in _MOVE_NOTHING:
            self.operations += 1
            self.bytes += sum(_size(leaf) for leaf in tree_leaves((args, kwargs, result)))
        return result


def _size(leaf: Any) -> int:
    if not isinstance(leaf, torch.Tensor) or leaf.is_sparse or leaf.is_nested:
        return 0
    return leaf.numel() * leaf.element_size()


class _Activations(saved_tensors_hooks):
    """Counts each memory once, however many operations keep it, until the last of them lets it go."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = {_memory(p) for p in parameters}
        self._kept: dict[int, int] = {}
        self._bytes = self.peak_bytes = 0
        super().__init__(self._pack, lambda kept: kept.tensor)

    def _pack(self, tensor: torch.Tensor) -> _Kept:
        memory = _memory(tensor)
        if memory is None or memory in self._parameters:
            return _Kept(tensor, None)
        size = tensor.untyped_storage().nbytes()
        self._kept[memory] = self._kept.get(memory, 0) + 1
        if self._kept[memory] == 1:
            self._bytes += size
            self.peak_bytes = max(self.peak_bytes, self._bytes)

        def let_go() -> None:
            self._kept[memory] -= 1
            if not self._kept[memory]:
                del self._kept[memory]
                self._bytes -= size

        return _Kept(tensor, let_go)


class _Kept:
    __slots__ = ("_let_go", "tensor")

    def __init__(self, tensor: torch.Tensor, let_go: Any) -> None:
        self.tensor, self._let_go = tensor, let_go

    def __del__(self) -> None:
        if self._let_go is not None:
            self._let_go()


def _memory(tensor: torch.Tensor) -> int | None:
    """Return what two tensors in the same memory have in common, also on the meta device; None if it has none."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse, or a wrapper
        return None
