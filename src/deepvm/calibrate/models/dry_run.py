"""A model on the meta device -> FLOPs, traffic and activations of one training step, without a weight or a sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from deepvm.calibrate.counting import StepCounter
from deepvm.calibrate.models.registry import ModelSpec

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
_CAST_BYTES = 2 * (4 + 2)  # of a parameter: its weight is cast to 16 bits, its gradient back


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Of one step of a model: forward, backward and optimizer."""

    flops: float
    traffic_bytes: int
    operations: int
    activation_bytes: int
    parameters: int

    @property
    def gradient_bytes(self) -> int:
        return 4 * self.parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """Of one step of an optimizer, and its state after that."""

    traffic_bytes: int
    operations: int
    state_bytes: int


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    """Make a model whose tensors have shapes and no memory."""
    with torch.device("meta"):
        return make().train()


def dry_update(optimizer: torch.optim.Optimizer) -> Update:
    """Count the update of parameters on the meta device."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.empty_like(parameter)
    with _AnyNumber():  # type: ignore[no-untyped-call]
        optimizer.step()  # makes the state
        counter = StepCounter(())
        counter.start()
        try:
            optimizer.step()
        finally:
            counter.stop()
    optimizer.zero_grad(set_to_none=True)
    state = [value for kept in optimizer.state.values() for value in kept.values() if isinstance(value, torch.Tensor)]
    return Update(
        traffic_bytes=counter.traffic_bytes,
        operations=counter.operations,
        state_bytes=sum(tensor.numel() * tensor.element_size() for tensor in state),
    )


def dry_step(model: nn.Module, spec: ModelSpec, batch: int, precision: str, update: Update) -> Counts:
    """Count a step of a model on the meta device. With 16 bits, it changes the model's type; weights are cast in every
    step and updated in 32 bits."""
    dtype = HALF.get(precision, torch.float32)
    model.to(dtype)
    parameters = sum(p.numel() for p in model.parameters())
    cast = _CAST_BYTES * parameters if precision in HALF else 0
    counter = StepCounter([*model.parameters(), *model.buffers()])
    with torch.device("meta"), _FlashAttention():
        inputs = spec.inputs(batch, spec.size, dtype)
        counter.start()
        try:
            spec.loss(model, inputs).backward()  # type: ignore[no-untyped-call]
        finally:
            counter.stop()
    model.zero_grad(set_to_none=True)
    return Counts(
        flops=counter.flops,
        traffic_bytes=counter.traffic_bytes + update.traffic_bytes + cast,
        operations=counter.operations + update.operations,
        activation_bytes=counter.activation_bytes,
        parameters=parameters,
    )


class _AnyNumber(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives Adafactor a number where it asks for a value: the meta device has none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 1.0
        return func(*args, **(kwargs or {}))


class _FlashAttention(TorchFunctionMode):
    """Computes attention as GPUs do. On the meta device torch would take the way that keeps a square of the length."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return _flash(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    del attn_mask, dropout_p  # a mask is read, but takes part in no product
    if enable_gqa:
        repeat = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeat, -3), value.repeat_interleave(repeat, -3)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    result: torch.Tensor = attend(query, key, value, 0.0, is_causal, scale=scale)[0]
    return result


def largest_unit(model: nn.Module) -> int:
    """Return the parameters of the largest module that FSDP would hold whole: a layer of a list, or what is in none."""
    layers = [layer for part in model.modules() if isinstance(part, nn.ModuleList) for layer in part]
    inside = {id(p) for layer in layers for p in layer.parameters()}
    outside = [[p] for p in model.parameters() if id(p) not in inside]
    units: Iterable[Any] = [*(list(layer.parameters()) for layer in layers), *outside]
    return max((sum(p.numel() for p in unit) for unit in units), default=0)
