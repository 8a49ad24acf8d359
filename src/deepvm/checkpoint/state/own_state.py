"""The caller's mapping of names to state: read at each save, written by restore. What is added to it later belongs to
the state from then on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from deepvm.checkpoint.state.fill import can_hold
from deepvm.checkpoint.state.owners import optimizers, stateful
from deepvm.checkpoint.state.skeleton import RESERVED, is_encodable
from deepvm.errors import UsageError


def check_state(state: Mapping[str, Any]) -> None:
    """Raise UsageError unless it maps names, none of them reserved, to values that restore() can write."""
    if not isinstance(state, Mapping):
        raise UsageError(
            f'the state is a {type(state).__name__}: pass a dict of names, as in Checkpointer({{"model": model, '
            '"optimizer": optimizer})'
        )
    for name, value in state.items():
        if not isinstance(name, str):
            raise UsageError(f"the state has the name {name!r}, a {type(name).__name__}: use text, as in 'model'")
        if not is_encodable(name):
            raise UsageError(f"the state has the name {name!a}, which is not valid text: choose another")
        if name.startswith(RESERVED):
            raise UsageError(
                f"the state has the name {name!r}: names that begin with {RESERVED!r} are reserved, choose another"
            )
        written = hasattr(value, "load_state_dict") or can_hold(value)
        if not written and not isinstance(state, MutableMapping):
            raise UsageError(
                f"{name!r} is a {type(value).__name__}, and restore() cannot write it into a {type(state).__name__}: "
                "pass a dict"
            )


def write_back(state: Mapping[str, Any], components: Mapping[str, Any]) -> None:
    """Write values that are other objects after a restore into the caller's mapping."""
    for name, before in list(state.items()):
        same = name not in components or components[name] is before or components[name] is stateful(before)
        if not same and isinstance(state, MutableMapping):
            state[name] = components[name]


class StepHooks:
    """Calls something before each step of the state's optimizers, also of those that are added later."""

    def __init__(self, state: Mapping[str, Any], before_step: Callable[..., None]) -> None:
        self._state = state
        self._before_step: Callable[..., None] | None = before_step
        self._watched: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._hooks: list[RemovableHandle] = []
        self.watch()

    def watch(self) -> Mapping[str, Any]:
        """Hook into new optimizers; return the current state, checked: what is saved and loaded."""
        check_state(self._state)
        for optimizer in optimizers(self._state):
            if self._before_step is not None and optimizer not in self._watched:
                self._watched.add(optimizer)
                self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
        return {name: stateful(part) for name, part in self._state.items()}

    def remove(self) -> None:
        self._before_step = None  # the bound method would keep the checkpointer alive
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()
        self._watched.clear()
