"""How many machines come and go at once: the parameters of one kernel in, chances from count to count out, and back.

A drop takes all machines, one, or a random number of them; a rise brings all, one, or a random number. The law is the
same for any number of machines.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepvm.errors import UsageError

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class BulkKernel:
    """In one tick: the chances of a drop and a rise, and of their sizes: all, one, some."""

    drop: float
    rise: float
    drop_sizes: tuple[float, float, float]
    rise_sizes: tuple[float, float, float]

    def __post_init__(self) -> None:
        if not (self.drop > 0 and self.rise > 0 and self.drop + self.rise < 1):
            raise UsageError(f"a drop of {self.drop} and a rise of {self.rise} must be above 0, and below 1 together")
        for sizes in (self.drop_sizes, self.rise_sizes):
            if len(sizes) != 3 or not all(s >= 0 for s in sizes) or abs(sum(sizes) - 1) > 1e-6:
                raise UsageError(f"the sizes {sizes} are not three shares of one")

    def matrix(self, machines: int) -> Floats:
        """Return [before, after]."""
        return np.asarray(self._parts(machines).sum(axis=0))

    def _parts(self, machines: int) -> Floats:
        """Return [cause, before, after]: a drop of all, one, some; a rise of all, one, some; a drop that finds no
        machine; a rise that finds all up; neither."""
        size = machines + 1
        counts = np.arange(size)
        before, after = counts[:, None], counts[None, :]
        room = machines - before
        shapes = (
            (after == 0) & (before > 0),
            (after == before - 1),
            (after < before) / np.maximum(1, before),
            (after == machines) & (room > 0),
            (after == before + 1),
            (after > before) / np.maximum(1, room),
            (after == before) & (before == 0),
            (after == before) & (room == 0),
            (after == before),
        )
        sizes = (*np.multiply(self.drop, self.drop_sizes), *np.multiply(self.rise, self.rise_sizes))
        weights = (*sizes, self.drop, self.rise, 1 - self.drop - self.rise)
        return np.stack([weight * shape for weight, shape in zip(weights, shapes, strict=True)])

    def updated(self, pairs: Floats, prior: BulkKernel, prior_events: float) -> BulkKernel:
        """Return the kernel that explains these transitions, [before, after], better: one step of a fit.

        The prior counts as many events as given."""
        parts = self._parts(len(pairs) - 1)
        share = parts / np.maximum(parts.sum(axis=0), 1e-300)
        causes = (share * pairs).sum(axis=(1, 2))
        prior_ticks = prior_events / (prior.drop + prior.rise)
        drops = causes[:3] + prior_ticks * prior.drop * np.array(prior.drop_sizes)
        rises = causes[3:6] + prior_ticks * prior.rise * np.array(prior.rise_sizes)
        dropped, risen = float(drops.sum() + causes[6]), float(rises.sum() + causes[7])
        total = dropped + risen + float(causes[8]) + prior_ticks * (1 - prior.drop - prior.rise)
        return BulkKernel(
            drop=dropped / total,
            rise=risen / total,
            drop_sizes=_shares(drops),
            rise_sizes=_shares(rises),
        )


def _shares(values: Floats) -> tuple[float, float, float]:
    first, second, third = (values / values.sum()).tolist()
    return first, second, third
