"""Synthetic capacity: hidden bulk models of zones and a random generator in, machines up by zone and tick out.

Zones of one group may share the chance that moves them, tick by tick. Each zone alone then keeps its own law exactly,
and the levels of the group rise and fall together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from deepvm.market.hazard.bulk import BulkKernel
from deepvm.market.hazard.chains import balance
from deepvm.market.trace import Counts

Floats = NDArray[np.float64]
_BLOCK = 64  # ticks that a region draws at once
_WARM_S = 48 * 3600.0  # until the start is forgotten


class Drawable(Protocol):
    @property
    def change(self) -> tuple[tuple[float, ...], ...]: ...

    @property
    def kernels(self) -> tuple[BulkKernel, ...]: ...

    @property
    def tick_s(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Region:
    """Zones that follow each other in a draw, with a generator of their own: no other region changes what they do."""

    chance: np.random.Generator
    zones: int
    groups: int


def draw(
    chance: np.random.Generator | Sequence[Region],
    models: Sequence[Drawable],
    *,
    machines: int,
    ticks: int,
    groups: Sequence[int] | None = None,
    shared: float = 0.0,
) -> Counts:
    """Draw [zone, tick], one model for each zone. ``shared``: how often a zone follows the chance of its group.

    Groups of ``Region`` are numbered in the order of the regions."""
    zones = len(models)
    distinct = list({id(model): model for model in models}.values())
    which = np.array([next(i for i, one in enumerate(distinct) if one is model) for model in models])
    change = np.stack([np.cumsum(np.array(model.change), axis=1) for model in distinct])
    kernels = np.stack([np.cumsum([kernel.matrix(machines) for kernel in model.kernels], axis=2) for model in distinct])
    _, group = np.unique(np.arange(zones) if groups is None else np.asarray(groups), return_inverse=True)
    states = change.shape[1]
    balanced = np.cumsum([balance(np.array(model.change)) for model in distinct], axis=1)
    first = [one.random(count) for one, count in _by_region(chance, zones)]
    state = _step(np.concatenate(first), balanced[which], states)
    at: NDArray[np.int64] = np.where(state == states - 1, 0, machines)
    up = np.empty((zones, ticks), np.int32)
    warm = -int(np.ceil(_WARM_S / models[0].tick_s))
    chances = _chances(chance, zones, group, shared > 0)
    for tick in range(warm, ticks):
        draws, together, follows = next(chances)
        if shared > 0:
            draws = np.where(follows < shared, together[:, group], draws)
        state = _step(draws[0], change[which, state], states)
        at = _step(draws[1], kernels[which, state, at], machines + 1)
        if tick >= 0:
            up[:, tick] = at
    return up


def _by_region(chance: np.random.Generator | Sequence[Region], zones: int) -> list[tuple[np.random.Generator, int]]:
    return [(chance, zones)] if isinstance(chance, np.random.Generator) else [(one.chance, one.zones) for one in chance]


def _chances(
    chance: np.random.Generator | Sequence[Region], zones: int, group: NDArray[np.int64], shared: bool
) -> Iterator[tuple[Floats, Floats, Floats]]:
    """Yield what each tick needs: [2, zone], [2, group] and [zone]."""
    groups = int(group.max()) + 1
    if isinstance(chance, np.random.Generator):
        nothing = np.empty(0)
        while True:
            own = chance.random((2, zones))
            yield (own, chance.random((2, groups)), chance.random(zones)) if shared else (own, nothing, nothing)
    while True:
        drawn = [one.chance.random((_BLOCK, 3 * one.zones + 2 * one.groups)) for one in chance]
        blocks = [np.split(block, _cuts(one), axis=1) for block, one in zip(drawn, chance, strict=True)]
        rows = [np.concatenate(parts, axis=1) for parts in zip(*blocks, strict=True)]
        for tick in range(_BLOCK):
            a, b, c, d, e = (part[tick] for part in rows)
            yield np.stack([a, b]), np.stack([d, e]), c


def _cuts(one: Region) -> list[int]:
    """Return where the five parts of a region's block end: three of zones, two of groups."""
    return [one.zones, 2 * one.zones, 3 * one.zones, 3 * one.zones + one.groups]


def _step(draws: NDArray[np.float64], sums: NDArray[np.float64], size: int) -> NDArray[np.int64]:
    """Return, row by row, the first entry whose cumulative chance reaches the draw."""
    return np.asarray(np.minimum((draws[:, None] > sums).sum(axis=1), size - 1))
