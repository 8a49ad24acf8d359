"""The state and every optimizer step of the process -> sentences about what trains and is not in the state.

These are optimizers, schedulers, GradScalers and the orders of loaders. ``component`` logs each sentence at the first
save, and a restore reports it as a reason to drift.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from deepvm.checkpoint.state import owners

_MOST_FRAMES = 12  # between GradScaler.step and a hook of the optimizer that it steps
_MOST_SAMPLERS = 12  # in a loader's chain
_RANDOM = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)  # torch's own: they have no state


class Untracked:
    """Observes all optimizers from its creation on."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state
        self._observed: dict[int, weakref.ref[torch.optim.Optimizer]] = {}
        self._scalers: list[weakref.ref[Any]] = []
        self._known: tuple[set[int], list[str]] = (set(), [])
        _observers.add(self)
        _hook_optimizers()

    def close(self) -> None:
        _observers.discard(self)

    def sentences(self) -> list[str]:
        """Say what is not in the state, of the optimizers that have stepped."""
        observed, found = self._known
        if observed != self._observed.keys() or not observed:
            optimizers = [one for ref in self._observed.values() if (one := ref()) is not None]
            found = [
                *self._optimizers(optimizers),
                *self._schedulers(optimizers),
                *self._grad_scalers(),
                *self._orders(),
            ]
            self._known = set(self._observed), found
        return found

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Record an optimizer that has stepped, and the GradScaler that stepped it."""
        known = self._observed.get(id(optimizer))
        if known is not None and known() is optimizer:
            return
        self._observed[id(optimizer)] = weakref.ref(optimizer)
        frame: Any = sys._getframe(1)
        for _ in range(_MOST_FRAMES):
            if frame is None:
                return
            owner = frame.f_locals.get("self")
            if isinstance(owner, torch.amp.GradScaler) and owner.is_enabled():
                self._scalers.append(weakref.ref(owner))
                return
            frame = frame.f_back

    def _opaque(self) -> list[Any]:
        """Return the components with a state of an unknown kind: it may contain anything."""
        known = (torch.nn.Module, torch.optim.Optimizer, LRScheduler, torch.amp.GradScaler, DataLoader)
        parts = [part for part in self._state.values() if hasattr(part, "state_dict")]
        return [part for part in parts if not isinstance(part, known) and not hasattr(part, "__iter__")]

    def _optimizers(self, optimizers: list[torch.optim.Optimizer]) -> list[str]:
        parts = self._state.values()
        saved = {id(p) for part in owners.optimizers(self._state) for p in _parameters(part)}
        trained = {id(p) for part in parts if isinstance(part, torch.nn.Module) for p in part.parameters()}
        found = []
        for optimizer in optimizers:
            own = {id(p) for p in _parameters(optimizer)}
            if optimizer.state and own & trained and not own & saved and not self._opaque():
                found.append(
                    f"an optimizer ({type(optimizer).__qualname__} of {len(own)} parameters) is not in the state: "
                    "after a restore it begins anew"
                )
        return found

    def _schedulers(self, optimizers: list[torch.optim.Optimizer]) -> list[str]:
        if self._opaque() or any(isinstance(part, LRScheduler) for part in self._state.values()):
            return []
        return [
            f"a learning rate scheduler (of {type(optimizer).__qualname__}) is not in the state: after a restore it "
            "begins anew"
            for optimizer in optimizers
            if hasattr(optimizer.step, "_wrapped_by_lr_sched")
        ]

    def _grad_scalers(self) -> list[str]:
        scalers = [one for ref in self._scalers if (one := ref()) is not None]
        if self._opaque() or any(scaler is part for part in self._state.values() for scaler in scalers):
            return []
        return ["a GradScaler is not in the state: after a restore it begins anew"] if scalers else []

    def _orders(self) -> list[str]:
        """Find loaders that keep their position, but not the order of their samples."""
        found = []
        for name, part in self._state.items():
            state_dict = getattr(type(part), "state_dict", None)  # a user's own may contain more than torchdata's
            of_torchdata = str(getattr(state_dict, "__module__", "")).startswith("torchdata")
            sampler = _random_sampler(part) if of_torchdata and isinstance(part, DataLoader) else None
            if sampler is not None:
                found.append(
                    f"the order of {name!r} is drawn by torch's {type(sampler).__qualname__}, which has no state: "
                    "after a restore in the middle of an epoch other samples follow; use shuffle=True, or "
                    "torchdata.stateful_dataloader.sampler.RandomSampler, or deepvm.resumable"
                )
        return found


_observers: weakref.WeakSet[Untracked] = weakref.WeakSet()


@cache
def _hook_optimizers() -> None:
    """Hook all optimizers, once and for good: a hook cannot be removed while hooks are being called."""

    def stepped(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for untracked in list(_observers):
            untracked.stepped(optimizer)

    register_optimizer_step_post_hook(stepped)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _random_sampler(loader: DataLoader[Any]) -> Any:
    """Return the sampler in a loader's chain that draws an order and has no state."""
    chain: list[Any] = [loader.batch_sampler, loader.sampler]
    for sampler in chain:  # it grows during the loop
        if hasattr(sampler, "state_dict"):
            return None
        if isinstance(sampler, _RANDOM):
            return sampler
        inner = getattr(sampler, "sampler", None)
        if inner is not None and len(chain) < _MOST_SAMPLERS:
            chain.append(inner)
    return None
