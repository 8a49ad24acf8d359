"""What a hazard model is: observations in; a likelihood, laws of spells and synthetic capacity out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from deepvm.market.hazard.hyperexponential import Hyperexponential
from deepvm.market.hazard.observed import Observed
from deepvm.market.trace import Counts


@dataclass(frozen=True, kw_only=True, slots=True)
class SpellPair:
    """How long a gang is up, and how long it then is not."""

    up: Hyperexponential
    down: Hyperexponential

    @property
    def availability(self) -> float:
        return self.up.mean_h / (self.up.mean_h + self.down.mean_h)


class HazardModel(Protocol):
    """Fitted by ``fit``, a class method of each model: it takes what was observed, and returns the model."""

    def loglik(self, observed: Sequence[Observed], *, machines: int) -> float:
        """Return the log-probability of every tick series "a gang of ``machines`` is up", given its first tick."""
        ...

    def spells(self, machines: int) -> SpellPair:
        """Return the laws of the up and down spells of a gang."""
        ...

    def sample(self, chance: np.random.Generator, *, zones: int, ticks: int, tick_s: float) -> Counts:
        """Draw machines up, [zone, tick], zones independent of each other."""
        ...
