"""A loader's first iterator after a restore: making it must leave the generators as they were when the state was saved.

torch's loaders draw a seed for their workers when an iterator is made. The run that was saved in the middle of an epoch
made its iterator long before; a resumed one makes it again, and would be one draw ahead from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from deepvm.checkpoint.determinism import rng_state

_MAKE = "_get_iterator"  # how torch's DataLoader and torchdata's StatefulDataLoader make theirs


def is_loader(component: Any) -> bool:
    """Whether a component tells where in its data a run is."""
    if isinstance(component, torch.nn.Module | torch.Tensor | Mapping | list | tuple | str):
        return False
    return isinstance(component, DataLoader | Sampler) or (
        hasattr(component, "state_dict") and hasattr(component, "__iter__")
    )


class FirstIterators:
    """Sets the generators again, once, right after a loader among the components has made its first iterator."""

    def __init__(self, components: Mapping[str, Any], put: Callable[[], object]) -> None:
        self._put = put
        self._waiting: list[Any] = []
        for component in components.values():
            if is_loader(component) and callable(getattr(component, _MAKE, None)):
                self._wait_for(component)

    def _wait_for(self, loader: Any) -> None:
        make = getattr(loader, _MAKE)

        def make_first() -> Any:
            self.forget()  # the first one that is asked for is the one that goes on
            before = rng_state.take()
            iterator = make()
            # One that was at its end when it was saved makes way for a new one at once, as it did in the saved run
            if getattr(iterator, "_finished", False):
                rng_state.put(before)
            else:
                self._put()
            return iterator

        setattr(loader, _MAKE, make_first)
        self._waiting.append(loader)

    def forget(self) -> None:
        """Leave the loaders as they were: training goes on, and iterators that come now are new to the run."""
        for loader in self._waiting:
            loader.__dict__.pop(_MAKE, None)
        self._waiting = []
