"""Synthetic capacity: hidden bulk models of zones and a random generator in, machines up by zone and tick out.

Zones of one group may share the chance that moves them, tick by tick. Each zone alone then keeps its own law exactly,
and the levels of the group rise and fall together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from deepvm.market.hazard.bulk import BulkKernel
from deepvm.market.hazard.chains import balance
from deepvm.market.trace import Counts

_WARM_S = 48 * 3600.0  # until the start is forgotten


class Drawable(Protocol):
    @property
    def change(self) -> tuple[tuple[float, ...], ...]: ...

    @property
    def kernels(self) -> tuple[BulkKernel, ...]: ...

    @property
    def tick_s(self) -> float: ...


def draw(
    chance: np.random.Generator,
    models: Sequence[Drawable],
    *,
    machines: int,
    ticks: int,
    groups: Sequence[int] | None = None,
    shared: float = 0.0,
) -> Counts:
    """Draw [zone, tick], one model for each zone. ``shared``: how often a zone follows the chance of its group."""
    zones = len(models)
    distinct = list({id(model): model for model in models}.values())
    which = np.array([next(i for i, one in enumerate(distinct) if one is model) for model in models])
    change = np.stack([np.cumsum(np.array(model.change), axis=1) for model in distinct])
    kernels = np.stack([np.cumsum([kernel.matrix(machines) for kernel in model.kernels], axis=2) for model in distinct])
    _, group = np.unique(np.arange(zones) if groups is None else np.asarray(groups), return_inverse=True)
    states = change.shape[1]
    balanced = np.cumsum([balance(np.array(model.change)) for model in distinct], axis=1)
    state = _step(chance.random(zones), balanced[which], states)
    at: NDArray[np.int64] = np.where(state == states - 1, 0, machines)
    up = np.empty((zones, ticks), np.int32)
    for tick in range(-int(np.ceil(_WARM_S / models[0].tick_s)), ticks):
        draws = chance.random((2, zones))
        if shared > 0:
            together = chance.random((2, int(group.max()) + 1))[:, group]
            draws = np.where(chance.random(zones) < shared, together, draws)
        state = _step(draws[0], change[which, state], states)
        at = _step(draws[1], kernels[which, state, at], machines + 1)
        if tick >= 0:
            up[:, tick] = at
    return up


def _step(draws: NDArray[np.float64], sums: NDArray[np.float64], size: int) -> NDArray[np.int64]:
    """Return, row by row, the first entry whose cumulative chance reaches the draw."""
    return np.asarray(np.minimum((draws[:, None] > sums).sum(axis=1), size - 1))
