"""Where a gang of machines trains: capacity and prices of zones in, a zone to start in and a reason to move out. Pure.

The simulator passes whole histories, [zone, tick]; the runtime passes one moment, [zone, 1]. Both use the same objects,
and both pass the prices of one machine, however many of a gang that shrinks are up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from deepvm.errors import UsageError

Flags = NDArray[np.bool_]
Floats = NDArray[np.float64]
Zones = NDArray[np.int64]

WAIT = -1  # no zone


class Placement(Protocol):
    def choose(self, up: Flags, usd: Floats) -> Zones:
        """Return the zone to start in at every tick, or WAIT. ``up`` and ``usd``, of one machine, are [zone, tick]."""
        ...

    def leave(self, up: Flags, usd: Floats) -> Flags:
        """Return [zone, tick]: True if a gang that trains there should move while it still can."""
        ...


@dataclass(frozen=True, slots=True)
class Stay:
    """Train in one zone, and wait for it. ``most_usd``: and never pay more for one machine."""

    zone: int = 0
    most_usd: float | None = None

    def choose(self, up: Flags, usd: Floats) -> Zones:
        if not 0 <= self.zone < len(up):
            raise UsageError(f"zone {self.zone} is outside of a market of {len(up)} zones")
        return np.where((up & ~_over(usd, self.most_usd))[self.zone], self.zone, WAIT)

    def leave(self, up: Flags, usd: Floats) -> Flags:
        del up
        return _over(usd, self.most_usd)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheapestUp:
    """Train in the cheapest zone that is up.

    ``ceiling``: never start in a zone dearer than this many times the cheapest price of all zones, up or not; without
    it, gangs get stuck in dear zones. ``way_back``: move when another zone is up for less than this share of the price.
    """

    ceiling: float = 3.0
    way_back: float | None = 0.7
    most_usd: float | None = None  # never pay more for one machine, such as the on-demand price

    def __post_init__(self) -> None:
        if not self.ceiling >= 1:
            raise UsageError(f"the ceiling is {self.ceiling}: it must be at least 1, or no zone would do")
        if self.way_back is not None and not 0 < self.way_back < 1:
            raise UsageError(f"way_back is {self.way_back}: it must be between 0 and 1")

    def _allowed(self, up: Flags, usd: Floats) -> Flags:
        return np.asarray(up & (usd <= self.ceiling * usd.min(axis=0, keepdims=True)) & ~_over(usd, self.most_usd))

    def choose(self, up: Flags, usd: Floats) -> Zones:
        priced = np.where(self._allowed(up, usd), usd, np.inf)
        best = priced.argmin(axis=0)
        return np.where(np.isfinite(priced[best, np.arange(priced.shape[1])]), best, WAIT)

    def leave(self, up: Flags, usd: Floats) -> Flags:
        too_dear = _over(usd, self.most_usd)
        if self.way_back is None:
            return too_dear
        cheapest = np.where(self._allowed(up, usd), usd, np.inf).min(axis=0, keepdims=True)
        return np.asarray((cheapest < self.way_back * usd) | too_dear)


def _over(usd: Floats, most_usd: float | None) -> Flags:
    return np.zeros(usd.shape, bool) if most_usd is None else np.asarray(usd > most_usd)
