"""Whose the tensors of a state are: a module's parameters, frozen ones among them, or an optimizer's.

Input: the state. Output: sets of addresses, by which taking.py decides how each tensor is saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def optimizers(state: Mapping[str, Any]) -> list[torch.optim.Optimizer]:
    return [part for part in state.values() if isinstance(part, torch.optim.Optimizer)]


class Owners:
    """The addresses of ``parameters``, of ``frozen`` ones, and of what is ``owned``: only an optimizer's step changes
    it, as a rule. Modules are walked once, since that takes as long as to plan."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        modules = [part for part in state.values() if isinstance(part, torch.nn.Module)]
        parameters = [(p.data_ptr(), p.requires_grad) for module in modules for p in module.parameters()]
        self.parameters = {address for address, _ in parameters}
        self.frozen = {address for address, trained in parameters if not trained} - {0}
        self.owned = _owned_addresses(state)
        self._late = tuple(f"{name}." for name, part in state.items() if isinstance(part, torch.optim.Optimizer))

    def stability(self, tensors: Mapping[str, torch.Tensor]) -> list[int]:
        """0 for frozen parameters, 1 for those that are trained, 3 for optimizers' state. 2 for all else, which is
        small: a restore on demand needs it at once, so it lies together."""
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
