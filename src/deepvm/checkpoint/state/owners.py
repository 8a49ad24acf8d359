"""The owners of a state's tensors: a module's parameters, some of them frozen, or an optimizer.

Input: the state. Output: sets of addresses, by which snapshotter.py decides how each tensor is saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_WRAPPED = ("optimizer", "_optimizer")  # where Accelerate and Lightning keep the optimizer that they wrap
_MOST_WRAPPERS = 8


def inner_optimizer(part: Any) -> torch.optim.Optimizer | None:
    """Return the optimizer that does the steps: the part itself, or the one that it wraps; else None. A scheduler has
    an optimizer, too, but no groups of parameters."""
    for _ in range(_MOST_WRAPPERS):
        if isinstance(part, torch.nn.Module | torch.Tensor | Mapping) or not hasattr(part, "param_groups"):
            return None
        known = (vars(part).get(name) for name in _WRAPPED) if hasattr(part, "__dict__") else ()
        wrapped = next((one for one in known if hasattr(one, "param_groups")), None)
        if wrapped is None:
            break
        part = wrapped
    return part if isinstance(part, torch.optim.Optimizer) else None


def stateful(part: Any) -> Any:
    """Return what is saved and loaded for a part: the optimizer in a wrapper without its own ``state_dict``."""
    own = getattr(type(part), "state_dict", None)
    inner = inner_optimizer(part) if own is None or own is torch.optim.Optimizer.state_dict else None
    return part if inner is None else inner


def optimizers(state: Mapping[str, Any]) -> list[torch.optim.Optimizer]:
    found = map(inner_optimizer, state.values())
    return [optimizer for optimizer in found if optimizer is not None]


class Owners:
    """The addresses of ``parameters``, of ``frozen`` ones, and of what is ``owned``: usually only an optimizer's step
    changes it. Modules are walked once, since that takes as long as to plan."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        modules = [part for part in state.values() if isinstance(part, torch.nn.Module)]
        parameters = [(p.data_ptr(), p.requires_grad) for module in modules for p in module.parameters()]
        self.parameters = {address for address, _ in parameters}
        self.frozen = {address for address, trained in parameters if not trained} - {0}
        self.owned = _owned_addresses(state)
        self._late = tuple(f"{name}." for name, part in state.items() if inner_optimizer(part) is not None)

    def stability(self, tensors: Mapping[str, torch.Tensor]) -> list[int]:
        """Return 0 for frozen parameters, 1 for those that are trained, 3 for optimizers' state. 2 for all else, which
        is small: a lazy restore needs it at once, so it lies together."""
        return [
            3 if name.startswith(self._late) else 0 if where in self.frozen else 1 if where in self.parameters else 2
            for name, where in ((name, tensor.data_ptr()) for name, tensor in tensors.items())
        ]


def _owned_addresses(state: Mapping[str, Any]) -> set[int]:
    owned: set[int] = set()
    for optimizer in optimizers(state):
        for group in optimizer.param_groups:
            owned.update(p.data_ptr() for p in group["params"])
        for values in optimizer.state.values():
            owned.update(v.data_ptr() for v in values.values() if isinstance(v, torch.Tensor))
    owned.discard(0)
    return owned
