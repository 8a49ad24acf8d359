"""A module and its saved state -> the parameters that ``load`` and ``lazy`` may fill themselves, and the loading of all
others. Fit are plain parameters of modules whose ``load_state_dict`` only copies tensors of the same names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from deepvm.checkpoint.restore import pending
from deepvm.checkpoint.restore.tensor_views import TensorViews
from deepvm.checkpoint.state.fill import fill_wrapper
from deepvm.checkpoint.state.skeleton import module_tensors, rebuild
from deepvm.checkpoint.state.tensor_kinds import fill_expanded, is_direct, is_expanded, is_wrapper
from deepvm.errors import CheckpointError

TORCH_NN = "torch.nn.modules."  # where torch's own modules are
_CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)
_OWN_USES = 2  # of memory that one tensor has: the tensor, and the object that counts

ByParameter = dict[int, tuple[torch.nn.Parameter, str]]  # by id: the parameter, and the saved tensor that is for it


def plain_parameters(module: torch.nn.Module, own: Mapping[str, Any], skeleton: Any, saved: TensorViews) -> ByParameter:
    """Return the parameters that can be filled directly. ``own`` is the live state, ``skeleton`` the saved one."""
    found: ByParameter = {}
    if not loads_plainly(module):
        return found
    names = module_tensors(skeleton)
    for key, tensor in own.items():
        if key not in names or not tensor.numel() or is_expanded(tensor) or not pending.can_wait(tensor):
            continue
        if saved.dtype(names[key]) is tensor.dtype and id(tensor) not in found:
            found[id(tensor)] = tensor, names[key]
    return found


def load_rest(
    module: torch.nn.Module,
    own: Mapping[str, Any],
    skeleton: Any,
    tensors: Mapping[str, torch.Tensor],
    without: Collection[int],
) -> None:
    """Load all of a module but the parameters with these ids: fill wrappers in place, copy plain tensors if the
    module's own loading would do no more, and leave the rest to that loading."""
    if not isinstance(skeleton, dict) or "$module" not in skeleton:
        module.load_state_dict(rebuild(skeleton, tensors))
        return
    rows = skeleton["$module"]
    rest = {key: row for key, row in rows.items() if id(own[key]) not in without}
    for key in [key for key in rest if is_wrapper(own[key])]:
        fill_wrapper(own[key], rest.pop(key), tensors)
    for key in [key for key in rest if is_expanded(own[key])]:
        fill_expanded(own[key], rebuild(rest.pop(key), tensors))
    if loads_plainly(module):
        saved = module_tensors({"$module": rest})
        direct = [key for key in saved if _is_copied(own[key]) and not loads_itself(module, key)]
        if direct:
            with torch.no_grad():
                torch._foreach_copy_([own[key] for key in direct], [tensors[saved[key]] for key in direct])
        for key in direct:
            del rest[key]
    if rest.keys() == own.keys():
        module.load_state_dict(rebuild(skeleton, tensors))
    elif rest:
        module.load_state_dict(rebuild({**skeleton, "$module": rest}, tensors), strict=False)


def loads_itself(module: torch.nn.Module, key: str) -> bool:
    """True if code of the user's loads a name of a module's state, which may change its size: extra state, and what a
    submodule has that loads its own state."""
    path, _, last = key.rpartition(".")
    if last == "_extra_state":
        return True
    try:
        owner = module.get_submodule(path)
    except AttributeError:  # a wrapper's own names
        return False
    theirs = type(owner)._load_from_state_dict is not torch.nn.Module._load_from_state_dict
    return (theirs and not type(owner).__module__.startswith(TORCH_NN)) or bool(owner._load_state_dict_pre_hooks)


def _is_copied(live: Any) -> bool:
    return isinstance(live, torch.Tensor) and is_direct(live) and not torch.nn.parameter.is_lazy(live)


def owns_memory(parameter: torch.nn.Parameter) -> bool:
    """True if nothing else uses the parameter's memory: no view, no NumPy array, no other process."""
    with torch._C.DisableTorchFunctionSubclass():
        storage = parameter.untyped_storage()
        counted: Callable[[], int] = getattr(parameter, "_use_count", lambda: 1)
        alone = counted() == 1  # DLPack hands out the tensor itself
        return alone and not storage.is_shared() and storage.resizable() and storage_uses(parameter) == _OWN_USES


def memory_of(parameter: torch.nn.Parameter) -> torch.UntypedStorage:
    """Return what keeps a parameter's memory, also one whose bytes have not arrived."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.untyped_storage()


def storage_uses(tensor: torch.Tensor) -> int:
    """Count the users of a tensor's memory, itself among them."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def is_compiled(module: torch.nn.Module) -> bool:
    compiled = any(getattr(m, "_compiled_call_impl", None) is not None for m in module.modules())
    return compiled or type(module).__name__ == "OptimizedModule"


def refuse_compiled(components: Mapping[str, Any]) -> None:
    for name, component in components.items():
        if isinstance(component, torch.nn.Module) and is_compiled(component):
            raise CheckpointError(
                f"{name} is compiled, and a compiled model cannot wait for single parameters: "
                "restore(lazy=True) before torch.compile, or restore() without lazy"
            )


def loads_plainly(module: torch.nn.Module) -> bool:
    """True if a module's ``load_state_dict`` only copies tensors of the same names."""
    plain = torch.nn.Module
    return all(
        type(m).load_state_dict is plain.load_state_dict
        and (type(m).__module__.startswith(TORCH_NN) or type(m)._load_from_state_dict is plain._load_from_state_dict)
        and not m._load_state_dict_pre_hooks
        and not m._load_state_dict_post_hooks
        for m in module.modules()
    )


def used_by(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return a module's own parameters, and its children's if it is one of torch's that do not run their children."""
    composite = type(module).__module__.startswith(TORCH_NN) and not isinstance(module, _CONTAINERS)
    return list(module.parameters(recurse=composite))
