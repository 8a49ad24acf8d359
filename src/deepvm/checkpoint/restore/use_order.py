"""A model's first forward -> the order in which its modules ran. Each checkpoint holds it, and a ``lazy`` restore reads
parameters in that order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from deepvm.checkpoint.restore.pending import OwnHook
from deepvm.errors import Corrupt

USE_ORDER = "deepvm.use_order"  # its name among the components of a state


class UseOrder:
    """A component of the state. Each hook on a module removes itself once it has run."""

    def __init__(self, components: Mapping[str, Any]) -> None:
        self._recorded: dict[str, list[str]] = {}
        self._known: dict[str, str] = {}  # from an earlier run
        self._hooks: list[RemovableHandle] = []
        for name, component in components.items():
            if isinstance(component, torch.nn.Module):
                for path, module in component.named_modules():
                    if next(module.parameters(recurse=False), None) is not None:
                        self._hooks.append(self._recorder(name, path, module))

    def state_dict(self) -> dict[str, str]:
        """Return one text per component: a list of thousands of names would cost every save a millisecond."""
        return {name: "\n".join(order) for name, order in self._recorded.items()} or self._known

    def check_state_dict(self, state: Any) -> None:
        if not isinstance(state, Mapping) or not all(isinstance(text, str) for text in state.values()):
            raise Corrupt("the saved order of modules is not a mapping of texts")

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        self.check_state_dict(state)
        self._known = dict(state)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _recorder(self, component: str, name: str, module: torch.nn.Module) -> RemovableHandle:
        recorder = _Recorder(partial(self._record, component, name))
        recorder.handle = module.register_forward_pre_hook(recorder)
        return recorder.handle

    def _record(self, component: str, name: str) -> None:
        self._recorded.setdefault(component, []).append(name)


class _Recorder(OwnHook):
    """Records the first forward of a module."""

    handle: RemovableHandle

    def __init__(self, record: Callable[[], None]) -> None:
        self._record = record

    def __call__(self, *_: object) -> None:
        if torch.compiler.is_compiling():  # a compiled model keeps its hook, and does not run it
            return
        self.handle.remove()
        self._record()


def modules_in_order(skeleton: Mapping[str, Any], component: str) -> list[str]:
    """Return the names of a component's modules in the order in which they ran; empty if it was not recorded."""
    text = skeleton.get(USE_ORDER, {}).get(component, "")
    return str(text).split("\n") if text else []
