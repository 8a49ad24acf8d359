"""What trains and is not in the state: an optimizer, its scheduler, a GradScaler, the order of a loader.

In: the state, and every step of every optimizer of the process. Out: a sentence for each, which is logged at the first
save and is a reason to drift for whoever restores it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from deepvm.checkpoint.state import owners

_FRAMES = 12  # between GradScaler.step and a hook of the optimizer that it steps
_RANDOM = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)  # torch's own: they have no state


class Forgotten:
    """Watches optimizers from its making on."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state
        self._seen: dict[int, weakref.ref[torch.optim.Optimizer]] = {}
        self._scalers: list[weakref.ref[Any]] = []
        self._known: tuple[set[int], list[str]] = (set(), [])
        _watch(self)

    def close(self) -> None:
        _watching.discard(self)

    def sentences(self) -> list[str]:
        """What is forgotten, as far as optimizers have stepped."""
        seen, found = self._known
        if seen != self._seen.keys() or not seen:
            optimizers = [one for ref in self._seen.values() if (one := ref()) is not None]
            found = [
                *self._optimizers(optimizers),
                *self._schedulers(optimizers),
                *self._grad_scalers(),
                *self._orders(),
            ]
            self._known = set(self._seen), found
        return found

    def see(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped."""
        known = self._seen.get(id(optimizer))
        if known is not None and known() is optimizer:
            return
        self._seen[id(optimizer)] = weakref.ref(optimizer)
        frame: Any = sys._getframe(1)
        for _ in range(_FRAMES):
            if frame is None:
                return
            owner = frame.f_locals.get("self")
            if isinstance(owner, torch.amp.GradScaler) and owner.is_enabled():
                self._scalers.append(weakref.ref(owner))
                return
            frame = frame.f_back

    def _opaque(self) -> list[Any]:
        """Components that have a state of a kind that is not known: anything may be in it."""
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
        """Of loaders that keep their position, but not the order in which it is one."""
        found = []
        for name, part in self._state.items():
            state_dict = getattr(type(part), "state_dict", None)  # a user's own may know more than torchdata's
            torchdatas = isinstance(part, DataLoader) and str(getattr(state_dict, "__module__", "")).startswith(
                "torchdata"
            )
            sampler = _random_sampler(part) if torchdatas else None
            if sampler is not None:
                kind = type(sampler).__qualname__
                found.append(
                    f"the order of {name!r} is drawn by torch's {kind}, which has no state: after a restore in the "
                    "middle of an epoch other samples follow; use shuffle=True, or "
                    "torchdata.stateful_dataloader.sampler.RandomSampler, or deepvm.resumable"
                )
        return found


_watching: weakref.WeakSet[Forgotten] = weakref.WeakSet()
_hooked = False


def _watch(forgotten: Forgotten) -> None:
    """With one hook for all, which stays: it cannot be removed while hooks are being called."""
    global _hooked
    _watching.add(forgotten)
    if not _hooked:
        _hooked = True
        register_optimizer_step_post_hook(_stepped)


def _stepped(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for forgotten in list(_watching):
        forgotten.see(optimizer)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _random_sampler(loader: DataLoader[Any]) -> Any:
    """The sampler in a loader's chain of samplers that draws an order and cannot tell it."""
    waiting: list[Any] = [loader.batch_sampler, loader.sampler]
    for sampler in waiting:  # it grows while it is walked
        if hasattr(sampler, "state_dict"):
            return None
        if isinstance(sampler, _RANDOM):
            return sampler
        inner = getattr(sampler, "sampler", None)
        if inner is not None and len(waiting) < _FRAMES:
            waiting.append(inner)
    return None
