"""The parameters of a module that can be given their bytes, or memory that holds them, without its own loading: plain
ones, of modules whose loading is no more than a copy into tensors of the same names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

import torch

from deepvm.checkpoint.restore import pending_parameter
from deepvm.checkpoint.state.fill import fill_wrapper
from deepvm.checkpoint.state.skeleton import module_tensors, rebuild
from deepvm.checkpoint.state.tensor_kinds import fill_expanded, is_direct, is_expanded, is_wrapper

TORCH_NN = "torch.nn.modules."  # where torch's own modules are
_OWN_USES = 2  # of memory that one tensor has: the tensor, and the object through which it is asked

ByParameter = dict[int, tuple[torch.nn.Parameter, str]]  # by id: the parameter, and the saved tensor that is for it


class Types(Protocol):
    def dtype(self, name: str) -> torch.dtype:
        """The type of a saved tensor."""
        ...


def plain_parameters(module: torch.nn.Module, own: Mapping[str, Any], skeleton: Any, types: Types) -> ByParameter:
    """Those of a module, with this live state, whose saved state has this skeleton."""
    found: ByParameter = {}
    if not _loads_plainly(module):
        return found
    saved = module_tensors(skeleton)
    for key, tensor in own.items():
        if key not in saved or not tensor.numel() or is_expanded(tensor):
            continue
        if not pending_parameter.can_be_awaited(tensor):
            continue
        if types.dtype(saved[key]) is tensor.dtype and id(tensor) not in found:
            found[id(tensor)] = tensor, saved[key]
    return found


def load_rest(
    module: torch.nn.Module,
    own: Mapping[str, Any],
    skeleton: Any,
    tensors: Mapping[str, torch.Tensor],
    without: Collection[int],
) -> None:
    """All of a module but the parameters with these ids: wrappers are filled in place, plain tensors are copied where
    the module's own loading would do no more than that, and the rest is loaded by it."""
    if not isinstance(skeleton, dict) or "$module" not in skeleton:
        module.load_state_dict(rebuild(skeleton, tensors))
        return
    rows = skeleton["$module"]
    rest = {key: row for key, row in rows.items() if id(own[key]) not in without}
    for key in [key for key in rest if is_wrapper(own[key])]:
        fill_wrapper(own[key], rest.pop(key), tensors)
    for key in [key for key in rest if is_expanded(own[key])]:
        fill_expanded(own[key], rebuild(rest.pop(key), tensors))
    if _loads_plainly(module):
        saved = module_tensors({"$module": rest})
        direct = [key for key in saved if isinstance(own[key], torch.Tensor) and _is_copied(own[key])]
        with torch.no_grad():
            _copy_all([own[key] for key in direct], [tensors[saved[key]] for key in direct])
        for key in direct:
            del rest[key]
    if rest.keys() == own.keys():
        module.load_state_dict(rebuild(skeleton, tensors))
    elif rest:
        module.load_state_dict(rebuild({**skeleton, "$module": rest}, tensors), strict=False)


def _copy_all(lives: list[torch.Tensor], saved: list[torch.Tensor]) -> None:
    if lives:
        torch._foreach_copy_(lives, saved)


def _is_copied(tensor: torch.Tensor) -> bool:
    return is_direct(tensor) and not torch.nn.parameter.is_lazy(tensor)


def owns_memory(parameter: torch.nn.Parameter) -> bool:
    """Whether nobody but the parameter itself would see that its memory is another: no view, no array of NumPy's, no
    other process."""
    with torch._C.DisableTorchFunctionSubclass():
        storage = parameter.untyped_storage()
        counted: Callable[[], int] = getattr(parameter, "_use_count", lambda: 1)
        alone = counted() == 1  # DLPack hands out the tensor itself
        return alone and not storage.is_shared() and storage.resizable() and uses(parameter) == _OWN_USES


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
