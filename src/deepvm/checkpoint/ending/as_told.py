"""How the state was when its step was told: whether it still is so, and where loaders and torch's generator were.

Input: the state, at each step and at the end. A step must not feel it, so a few tensors stand for all: they are read by
version counter and address. Writes that count no version (``.data``, NumPy, C++) are not seen.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

TRAINED, FROZEN, BUFFERS = 8, 2, 2  # tensors that are looked at, of each kind at most
_PLAIN = (torch.Tensor, torch.nn.Parameter)  # others (DTensor, ...) come and go by themselves

_Holder = Mapping[str, Any]


class AsTold:
    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state
        self._watched: list[tuple[str, _Holder, str]] | None = None
        self._seen: list[Any] = []
        self._loaders: list[tuple[str, Any, int, Any]] = []
        self._random: torch.Tensor | None = None

    def take(self, *, arriving: bool) -> None:
        """``arriving``: a restore still writes to the state, so writes mean nothing."""
        if self._watched is None:
            self._watched = list(_chosen(self._state))
        self._seen = [] if arriving else _look(self._watched)
        self._loaders = [
            (name, part, part.handed_out, part.state_dict())
            for name, part in self._state.items()
            if hasattr(part, "handed_out")
        ]
        self._random = torch.default_generator.get_state()

    def changed(self) -> str | None:
        """A tensor that was written to, or replaced, since; None where none of those that are looked at was."""
        now = _look(self._watched or ()) if self._seen else []
        found = zip(self._watched or (), now, self._seen, strict=False)
        return next((path for (path, _, _), new, old in found if new != old), None)

    @contextmanager
    def put_back(self) -> Iterator[dict[str, Any]]:
        """torch's generator is as it was; what stands for loaders that have handed out batches since."""
        now = torch.default_generator.get_state()
        if self._random is not None:
            torch.default_generator.set_state(self._random)
        try:
            yield {
                name: _Position(position)
                for name, loader, handed_out, position in self._loaders
                if loader.handed_out != handed_out
            }
        finally:
            torch.default_generator.set_state(now)


class _Position:
    """Is saved in a loader's place."""

    def __init__(self, position: Any) -> None:
        self._position = position

    def state_dict(self) -> Any:
        return self._position


def _look(watched: Iterable[tuple[str, _Holder, str]]) -> list[Any]:
    """All at once, since every step does it."""
    tensors: list[Any] = [holder.get(name) for _, holder, name in watched]
    try:
        return [
            (id(tensor), tensor._version, tensor.data_ptr()) if type(tensor) in _PLAIN else None for tensor in tensors
        ]
    except RuntimeError:  # one has no version (inference mode) or no address (sparse): then none is looked at
        return []


def _chosen(state: Mapping[str, Any]) -> Iterator[tuple[str, _Holder, str]]:
    """Where tensors are kept, and under which name, spread over all that the state has."""
    trained: list[tuple[str, _Holder, str]] = []
    frozen: list[tuple[str, _Holder, str]] = []
    buffers = [(name, state, name) for name, part in state.items() if type(part) in _PLAIN]
    for root, part in state.items():
        if not isinstance(part, torch.nn.Module):
            continue
        modules = dict(part.named_modules(prefix=root))
        if any("fsdp" in base.__module__ for module in modules.values() for base in type(module).__mro__):
            continue  # it gives parameters other memory for every forward pass
        for path, module in modules.items():
            for name, parameter in module._parameters.items():
                kind = trained if parameter is not None and parameter.requires_grad else frozen
                kind.append((f"{path}.{name}", module._parameters, name))
            passing = module._non_persistent_buffers_set
            buffers += [(f"{path}.{name}", module._buffers, name) for name in module._buffers if name not in passing]
    yield from _spread(trained, TRAINED)
    yield from _spread(frozen, FROZEN)
    yield from _spread(buffers, BUFFERS)


def _spread(found: Sequence[tuple[str, _Holder, str]], most: int) -> Iterator[tuple[str, _Holder, str]]:
    """One out of each of so many equal parts, by chance, so that not all are weights or all biases; always the same."""
    chance, parts = random.Random(0), min(most, len(found))  # noqa: S311 - no secret
    for part in range(parts):
        first, end = part * len(found) // parts, (part + 1) * len(found) // parts
        yield found[chance.randrange(first, end)]
