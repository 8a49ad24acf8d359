"""Kinds of tensors: which bytes represent one, in which layout it lies, and which cannot be saved.

Input: a state's tensors; skeleton.py asks. Every tensor passes ``check_readable`` before its address is used: one
without memory of its own is a wrapper, which is saved by the tensors that it holds, or is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from deepvm.errors import CheckpointError, Corrupt

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_ADDRESSED = ("cpu", "cuda")  # devices on which an address of 0 means no memory
_SHARDED = {"torch.distributed.tensor": "DTensor", "torch.distributed._shard.sharded_tensor": "ShardedTensor"}


def is_wrapper(value: object) -> bool:
    """True if it is a tensor whose content is in the tensors that it names with ``__tensor_flatten__``."""
    if type(value) in _PLAIN or not isinstance(value, torch.Tensor):
        return False
    kind = type(value)
    return hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")


def is_direct(tensor: torch.Tensor) -> bool:
    """True if the tensor itself is saved, and not one that is made for each save."""
    return type(tensor) in _PLAIN and not tensor.is_neg() and not tensor.is_conj()


def is_sharded(tensor: torch.Tensor) -> bool:
    """True if each rank has only a part of it."""
    if type(tensor) in _PLAIN:
        return False
    known = ((sys.modules.get(module), name) for module, name in _SHARDED.items())
    return any(isinstance(tensor, getattr(module, name)) for module, name in known if hasattr(module, name))


def check_readable(name: str, tensor: torch.Tensor) -> None:
    """Raise CheckpointError with the tensor's name if its bytes cannot be read."""
    why = _refusal(tensor)
    if why is not None:
        raise CheckpointError(f"{name} is {why}")


def check_whole(name: str, tensor: torch.Tensor) -> None:
    """Raise CheckpointError if each rank has only a part of the tensor."""
    if is_sharded(tensor):
        raise CheckpointError(f"{name} is {_sharded(tensor)}")


def check_fillable(name: str, tensor: torch.Tensor) -> None:
    """Raise CheckpointError if a restore cannot fill a tensor of a module."""
    check_whole(name, tensor)
    if tensor.is_meta:
        raise CheckpointError(f"{name} is on the meta device, and cannot be filled: call to_empty(device=...) first")


def _sharded(tensor: torch.Tensor) -> str:
    return (
        f"a {type(tensor).__name__}, of which each rank has a part: save and load it through "
        "torch.distributed.checkpoint, with deepvm.checkpoint.dcp.DeepvmWriter(URL, run=RUN, step=N) and "
        "DeepvmReader(URL, run=RUN)"
    )


def _refusal(tensor: torch.Tensor) -> str | None:
    if is_sharded(tensor):
        return _sharded(tensor)
    if torch.nn.parameter.is_lazy(tensor):
        return "not initialized yet, and cannot be saved: run the model once before the first save"
    if tensor.is_nested:
        return "a nested tensor, and cannot be saved: save its values and offsets"
    if tensor.is_quantized:
        return "a quantized tensor, and cannot be saved: save its int_repr(), scale and zero point"
    if tensor.layout is not torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        return f"a tensor of layout {layout}, and cannot be saved: make it dense first"
    if tensor.is_meta:
        return "on the meta device, and cannot be saved: call to_empty(device=...) and fill it first"
    return None if _has_memory(tensor) else _without_memory(tensor)


def _has_memory(tensor: torch.Tensor) -> bool:
    """True if every element is within the tensor's memory."""
    count = tensor.numel()
    if not count:
        return True
    storage = tensor.untyped_storage()
    if type(tensor) in _PLAIN:
        if not tensor.is_cpu and tensor.device.type not in _ADDRESSED:
            return True  # copied by its device, which has its own idea of addresses
    elif storage.device.type == "meta":
        return False  # asking for the address of a fake tensor is an error
    if tensor.data_ptr() == 0:
        return False
    if not tensor.is_contiguous():
        count = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return storage.nbytes() >= (tensor.storage_offset() + count) * tensor.element_size()


def _without_memory(tensor: torch.Tensor) -> str:
    kind = type(tensor)
    if kind in _PLAIN:
        return "a tensor whose memory was freed (its storage is smaller than its shape), and cannot be saved"
    return (
        f"a {kind.__module__}.{kind.__qualname__}, which has no memory of its own and cannot be saved: give the class "
        "__tensor_flatten__ and __tensor_unflatten__, or save what it holds"
    )


# --- layouts --------------------------------------------------------------------------------------------------------


def own_stride(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the strides of a tensor without gaps in the same order; None if that is the usual one, row by row."""
    if tensor.is_contiguous() and (tensor.ndim < 2 or 1 not in tensor.shape):
        return None
    if not tensor.numel():
        return None
    stride = tuple(torch.empty_like(tensor, device="meta").stride())
    return None if stride == usual_stride(tensor.shape) else stride


def usual_stride(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(torch.empty(shape, device="meta").stride())


def laid_out(tensor: torch.Tensor, stride: Any) -> torch.Tensor:
    """Return the tensor, or a copy of it, with these strides, as a file has them."""
    if not isinstance(stride, list | tuple) or not _is_dense(tensor.shape, stride):
        raise Corrupt(f"a saved tensor of shape {tuple(tensor.shape)} cannot have the strides {stride!r}")
    if tensor.stride() == tuple(stride):
        return tensor
    made = torch.empty_strided(tensor.shape, tuple(stride), dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)


def _is_dense(shape: Sequence[int], stride: Sequence[Any]) -> bool:
    if len(shape) != len(stride) or not all(type(step) is int and 0 <= step < 2**62 for step in stride):
        return False
    expected = 1
    for step, n in sorted((step, n) for step, n in zip(stride, shape, strict=True) if n != 1):
        if step != expected:
            return False
        expected *= n
    return True


def is_expanded(tensor: object) -> bool:
    """True if several of its elements share memory: torch does not write into such a tensor."""
    if not isinstance(tensor, torch.Tensor) or type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
        return False
    return any(step == 0 and n > 1 for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def fill_expanded(tensor: torch.Tensor, saved: torch.Tensor) -> None:
    """Fill each element in memory once. If the saved values of a shared element differ, the tensor gets memory of its
    own."""
    once, same = tensor.detach(), saved
    for dim, (n, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if step == 0 and n > 1:
            once, same = once.narrow(dim, 0, 1), same.narrow(dim, 0, 1)
    if torch.equal(same.expand_as(saved), saved):
        once.copy_(same)
    else:
        tensor.data = saved.to(tensor.device, tensor.dtype, copy=True)


# --- wrappers -------------------------------------------------------------------------------------------------------


def inner_tensors(wrapper: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Return the tensors that a wrapper holds, by their attributes, and its own settings."""
    names, context = wrapper.__tensor_flatten__()
    return {name: getattr(wrapper, name) for name in names}, context


def class_name(tensor: torch.Tensor) -> str:
    return f"{type(tensor).__module__}:{type(tensor).__qualname__}"


def class_named(name: str) -> Any:
    """Find the class of a wrapper in a module that is imported already: a checkpoint imports nothing."""
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = vars(found).get(part) if isinstance(found, ModuleType | type) else None  # getattr may import
    usable = isinstance(found, type) and issubclass(found, torch.Tensor) and hasattr(found, "__tensor_unflatten__")
    if not usable:
        raise CheckpointError(
            f"the checkpoint has tensors of class {qualname}, which this process does not know: import {module} before "
            "restore()"
        )
    return found
