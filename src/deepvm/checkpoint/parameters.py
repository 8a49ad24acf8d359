"""The parameters of a module that can be given their bytes, or memory that holds them, without its own loading: plain
ones, of modules whose loading is no more than a copy into tensors of the same names."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any

import torch

from deepvm.checkpoint import awaited
from deepvm.checkpoint.state import module_tensors

TORCH_NN = "torch.nn.modules."  # where torch's own modules are
_OWN_USES = 2  # of memory that one tensor has: the tensor, and the object through which it is asked

ByParameter = dict[int, tuple[torch.nn.Parameter, str]]  # by id: the parameter, and the saved tensor that is for it


def plain_parameters(module: torch.nn.Module, skeleton: Any, tensors: Mapping[str, torch.Tensor]) -> ByParameter:
    """Those of a module whose saved state has this skeleton and these tensors."""
    found: ByParameter = {}
    if not _loads_plainly(module):
        return found
    saved = module_tensors(skeleton)
    for key, tensor in module.state_dict(keep_vars=True).items():
        if key not in saved or not awaited.can_be_awaited(tensor) or not tensor.numel():
            continue
        if tensors[saved[key]].dtype is tensor.dtype and id(tensor) not in found:
            found[id(tensor)] = tensor, saved[key]
    return found


def load_rest(module: torch.nn.Module, saved: Any, without: Collection[int]) -> None:
    """All of a module but the parameters with these ids, by the module's own loading."""
    own = module.state_dict(keep_vars=True)
    rest = OrderedDict((key, value) for key, value in saved.items() if id(own[key]) not in without)
    if len(rest) == len(saved):
        module.load_state_dict(saved)
        return
    if hasattr(saved, "_metadata"):
        rest._metadata = saved._metadata  # type: ignore[attr-defined]
    module.load_state_dict(rest, strict=False)


def owns_memory(parameter: torch.nn.Parameter) -> bool:
    """Whether nobody but the parameter itself would see that its memory is another: no view, no array of NumPy's, no
    other process."""
    with torch._C.DisableTorchFunctionSubclass():
        storage = parameter.untyped_storage()
        return not storage.is_shared() and storage.resizable() and uses(parameter) == _OWN_USES


def uses(tensor: torch.Tensor) -> int:
    """How many hold the memory of a tensor, itself among them."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def is_compiled(module: torch.nn.Module) -> bool:
    compiled = any(getattr(m, "_compiled_call_impl", None) is not None for m in module.modules())
    return compiled or type(module).__name__ == "OptimizedModule"


def _loads_plainly(module: torch.nn.Module) -> bool:
    return all(
        type(m).load_state_dict is torch.nn.Module.load_state_dict
        and (type(m).__module__.startswith(TORCH_NN) or _untouched(type(m)))
        and not m._load_state_dict_pre_hooks
        and not m._load_state_dict_post_hooks
        for m in module.modules()
    )


def _untouched(kind: type[torch.nn.Module]) -> bool:
    return kind._load_from_state_dict is torch.nn.Module._load_from_state_dict
