"""The planning default: up and down spells of two phases take turns. Observations in, laws for each gang size out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from deepvm.errors import UsageError
from deepvm.market.hazard.hyperexponential import TYPICAL_DOWN, TYPICAL_UP, Hyperexponential, fit_spells
from deepvm.market.hazard.model import SpellPair
from deepvm.market.hazard.observed import Observed, spells_of
from deepvm.market.trace import Counts

TYPICAL = SpellPair(up=TYPICAL_UP, down=TYPICAL_DOWN)
PRIOR_SPELLS = 2.0


@dataclass(frozen=True, kw_only=True)
class AlternatingSpells:
    """Spells by gang size. A gang is up completely or not at all: ``sample`` knows no shrinking."""

    by_machines: Mapping[int, SpellPair]

    def __post_init__(self) -> None:
        if not self.by_machines or min(self.by_machines) < 1:
            raise UsageError("spells are fitted for gangs of at least one machine: give at least one gang size")

    @classmethod
    def fit(
        cls,
        observed: Sequence[Observed],
        machines: Sequence[int],
        *,
        half_life_h: float | None = None,
        prior: AlternatingSpells | None = None,
        prior_spells: float = PRIOR_SPELLS,
    ) -> AlternatingSpells:
        """Pool zones and fit each gang size. ``half_life_h`` lets recent spells count more.

        ``prior`` is a fit of a larger class, such as all zones of an accelerator; it counts as ``prior_spells`` spells.
        """
        if not observed:
            raise UsageError("a hazard needs at least one zone that was observed")
        pairs = {}
        for count in machines:
            base = TYPICAL if prior is None else prior.spells(count)
            laws = [
                fit_spells(
                    spells_of(observed, count, up=up, half_life_h=half_life_h),
                    prior=law,
                    prior_spells=prior_spells,
                )
                for up, law in ((True, base.up), (False, base.down))
            ]
            pairs[count] = SpellPair(up=laws[0], down=laws[1])
        return cls(by_machines=pairs)

    def spells(self, machines: int) -> SpellPair:
        if machines not in self.by_machines:
            known = ", ".join(map(str, sorted(self.by_machines)))
            raise UsageError(f"spells of {machines} machines were not fitted, only of {known}: fit them")
        return self.by_machines[machines]

    def loglik(self, observed: Sequence[Observed], *, machines: int) -> float:
        pair = self.spells(machines)
        sides = ((True, pair.up), (False, pair.down))
        return sum(law.loglik(spells_of(observed, machines, up=up)) for up, law in sides)

    def sample(
        self, chance: np.random.Generator, *, zones: int, ticks: int, tick_s: float, machines: int | None = None
    ) -> Counts:
        """Draw capacities of ``machines`` or none; of the largest gang unless given."""
        count = max(self.by_machines) if machines is None else machines
        pair = self.spells(count)
        flags = [_series(chance, pair, ticks, tick_s / 3600) for _ in range(zones)]
        return (np.stack(flags) * count).astype(np.int32)


def _series(chance: np.random.Generator, pair: SpellPair, ticks: int, tick_h: float) -> np.ndarray:
    """Draw one zone's levels by tick, in balance from the first tick on. A spell lasts a tick at least."""
    mean_ticks = [_mean_ticks(law, tick_h) for law in (pair.up, pair.down)]
    up = bool(chance.random() < mean_ticks[0] / sum(mean_ticks))
    first = _whole(_met(pair.up if up else pair.down, tick_h).sample(chance, 1), tick_h)
    cycles = 8 + int(1.5 * ticks / sum(mean_ticks))
    while True:
        drawn = [_whole(law.sample(chance, cycles), tick_h) for law in (pair.down, pair.up)]
        turns = np.stack(drawn if up else drawn[::-1], axis=1).ravel()
        lengths = np.concatenate([first, turns])
        if lengths.sum() >= ticks:
            break
        cycles *= 2
    levels = np.resize(np.array([up, not up]), len(lengths))
    return np.repeat(levels, np.minimum(lengths, ticks))[:ticks]


def _whole(hours: np.ndarray, tick_h: float) -> np.ndarray:
    return np.maximum(1, np.ceil(hours / tick_h)).astype(np.int64)


def _met(law: Hyperexponential, tick_h: float) -> Hyperexponential:
    """Return the law of the rest of a spell that a first tick meets, in whole ticks."""
    biased = np.array(law.weights) / -np.expm1(-tick_h / np.array(law.means_h))
    return Hyperexponential(weights=tuple((biased / biased.sum()).tolist()), means_h=law.means_h)


def _mean_ticks(law: Hyperexponential, tick_h: float) -> float:
    return float(np.dot(law.weights, 1 / -np.expm1(-tick_h / np.array(law.means_h))))
