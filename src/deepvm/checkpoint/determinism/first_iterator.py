"""The loaders of a restored state -> the same, whose first iterator leaves the generators as they were saved.

torch's loaders draw a seed for their workers when an iterator is created. A run that was saved in the middle of an
epoch had drawn it before; a resumed run draws it again, and would be one draw ahead from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from deepvm.checkpoint.determinism import rng_state

_MAKE = "_get_iterator"  # creates the iterators of torch's DataLoader and torchdata's StatefulDataLoader


def is_loader(component: Any) -> bool:
    """True if a component keeps the position in its data."""
    if isinstance(component, torch.nn.Module | torch.Tensor | Mapping | list | tuple | str):
        return False
    return isinstance(component, DataLoader | Sampler) or (
        hasattr(component, "state_dict") and hasattr(component, "__iter__")
    )


class FirstIterators:
    """Calls ``put``, which sets the generators, once: right after a loader among the components has created its first
    iterator."""

    def __init__(self, components: Mapping[str, Any], put: Callable[[], object]) -> None:
        self._put = put
        self._hooked: list[Any] = []
        for component in components.values():
            if is_loader(component) and callable(getattr(component, _MAKE, None)):
                self._hook(component)

    def _hook(self, loader: Any) -> None:
        make = getattr(loader, _MAKE)

        def make_first() -> Any:
            self.unhook()  # the first iterator is the one that continues
            before = rng_state.take()
            iterator = make()
            # One that was saved at its end is replaced by a new one at once, as in the saved run
            if getattr(iterator, "_finished", False):
                rng_state.put(before)
            else:
                self._put()
            return iterator

        setattr(loader, _MAKE, make_first)
        self._hooked.append(loader)

    def unhook(self) -> None:
        """Leave the loaders as they were: iterators that are created from now on are new."""
        for loader in self._hooked:
            loader.__dict__.pop(_MAKE, None)
        self._hooked = []
