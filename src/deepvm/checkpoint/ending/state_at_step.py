"""The state as it was at ``step()``: whether it changed since, and where loaders and torch's generator were.

Input: the state, at each step and at the end; unsaved.py asks. To cost a step nothing, it samples a few tensors by
version counter and address. Writes that do not count as a version (``.data``, NumPy, C++) are not noticed.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

TRAINED, FROZEN, BUFFERS = 8, 2, 2  # tensors sampled of each kind, at most
_PLAIN = (torch.Tensor, torch.nn.Parameter)  # others (DTensor, ...) are replaced by their framework

_Place = tuple[str, Mapping[str, Any], str]  # a tensor: its path, what holds it, and under which name


class StateAtStep:
    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state
        self._sampled: list[_Place] | None = None
        self._marks: list[Any] = []
        self._loaders: list[tuple[str, Any, int, Any]] = []
        self._random: torch.Tensor | None = None

    def record(self, *, arriving: bool) -> None:
        """Record the state now. ``arriving``: a lazy restore still writes to it, so writes mean nothing."""
        if self._sampled is None:
            self._sampled = list(_sample(self._state))
        self._marks = [] if arriving else _read_marks(self._sampled)
        self._loaders = [
            (name, part, part.handed_out, part.state_dict())
            for name, part in self._state.items()
            if hasattr(part, "handed_out")
        ]
        self._random = torch.default_generator.get_state()

    def changed(self) -> str | None:
        """Return the path of a sampled tensor that was written or replaced since; None if none was."""
        now = _read_marks(self._sampled or ()) if self._marks else []
        found = zip(self._sampled or (), now, self._marks, strict=False)
        return next((path for (path, _, _), new, old in found if new != old), None)

    @contextmanager
    def put_back(self) -> Iterator[dict[str, Any]]:
        """Set torch's generator back; yield the recorded positions of loaders that have handed out batches since."""
        now = torch.default_generator.get_state()
        if self._random is not None:
            torch.default_generator.set_state(self._random)
        try:
            yield {
                name: SimpleNamespace(state_dict=lambda position=position: position)  # saved in the loader's place
                for name, loader, handed_out, position in self._loaders
                if loader.handed_out != handed_out
            }
        finally:
            torch.default_generator.set_state(now)


def _read_marks(sampled: Iterable[_Place]) -> list[Any]:
    """Read identity, version and address of all, in one go, since every step does it."""
    tensors: list[Any] = [holder.get(name) for _, holder, name in sampled]
    try:
        return [
            (id(tensor), tensor._version, tensor.data_ptr()) if type(tensor) in _PLAIN else None for tensor in tensors
        ]
    except RuntimeError:  # one has no version (inference mode) or no address (sparse): then none is compared
        return []


def _sample(state: Mapping[str, Any]) -> Iterator[_Place]:
    """Choose tensors, spread over all that the state has."""
    trained: list[_Place] = []
    frozen: list[_Place] = []
    buffers: list[_Place] = [(name, state, name) for name, part in state.items() if type(part) in _PLAIN]
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
            transient = module._non_persistent_buffers_set
            buffers += [(f"{path}.{name}", module._buffers, name) for name in module._buffers if name not in transient]
    yield from _spread(trained, TRAINED)
    yield from _spread(frozen, FROZEN)
    yield from _spread(buffers, BUFFERS)


def _spread(found: Sequence[_Place], most: int) -> Iterator[_Place]:
    """Choose one out of each of ``most`` equal parts, by chance: not only weights or only biases. Always the same."""
    chance, parts = random.Random(0), min(most, len(found))  # noqa: S311 - no secret
    for part in range(parts):
        first, end = part * len(found) // parts, (part + 1) * len(found) // parts
        yield found[chance.randrange(first, end)]
