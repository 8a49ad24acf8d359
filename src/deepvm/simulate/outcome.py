"""What became of simulated runs: one entry of every column for each start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
PERCENTILES = (5, 50, 95)


@dataclass(frozen=True, kw_only=True)
class Outcomes:
    """``hours`` and dollars from start to end. A run that its trace did not end is not ``finished``."""

    hours: Floats
    spot_usd: Floats
    on_demand_usd: Floats
    keeper_usd: Floats
    transfer_usd: Floats
    lost_h: Floats  # work that was repeated
    trained_h: Floats  # work done, repeated work included
    losses: NDArray[np.int64]
    moves: NDArray[np.int64]
    on_demand_h: Floats
    waiting_h: Floats
    finished: NDArray[np.bool_]

    @property
    def cost_usd(self) -> Floats:
        return self.spot_usd + self.on_demand_usd + self.keeper_usd + self.transfer_usd

    @classmethod
    def joined(cls, parts: Sequence[Outcomes]) -> Outcomes:
        """Put the runs of several replays one after the other."""
        return cls(
            **{name: np.concatenate([getattr(part, name) for part in parts]) for name in cls.__dataclass_fields__}
        )

    def for_starts(self, count: int) -> Outcomes:
        """Return this many runs: the same one for each, if there is one for all of them, as of on-demand machines."""
        if len(self.hours) == count:
            return self
        return Outcomes(**{name: np.resize(getattr(self, name), count) for name in self.__dataclass_fields__})

    def missed(self, deadline_h: float | None) -> NDArray[np.bool_]:
        """True for runs that did not end, or ended after the deadline."""
        late = np.zeros(len(self.hours), bool) if deadline_h is None else self.hours > deadline_h * (1 + 1e-9)
        return late | ~self.finished


def spread(values: Floats) -> dict[str, float]:
    """Return mean, p5, p50 and p95."""
    figures = np.percentile(values, PERCENTILES)
    named = {f"p{p}": float(figure) for p, figure in zip(PERCENTILES, figures, strict=True)}
    return {"mean": float(np.clip(values.mean(), values.min(), values.max())), **named}  # of equal ones, that one


def summary(outcomes: Outcomes, deadline_h: float | None) -> dict[str, Any]:
    return {
        "cost_usd": spread(outcomes.cost_usd),
        "hours": spread(outcomes.hours),
        "missed": float(outcomes.missed(deadline_h).mean()),
        "lost_hours": float(outcomes.lost_h.mean()),
        "moves": float(outcomes.moves.mean()),
    }
