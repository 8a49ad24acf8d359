"""Which hazard model explains what came later: observations in, log-likelihoods of their last part out.

Every model is fitted to the first part of each zone. Judged is the log-probability of the later ticks given the earlier
ones, in nats per tick: of "the gang is up", which all models have, and of the machines up, which only some have. All
models have the same prior, two spells of typical length. Where next to nothing happened, the prior decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepvm.json_fields import json_fields
from deepvm.market.hazard.alternating import AlternatingSpells
from deepvm.market.hazard.hidden import HiddenBulk
from deepvm.market.hazard.model import HazardModel
from deepvm.market.hazard.observed import Observed
from deepvm.market.hazard.poisson import IndependentMachines

SHARE = 0.6
HALF_LIFE_H = 72.0
_CLASS_SPELLS = 5.0  # that the fit of all zones counts as in the fit of one


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    """Nats per tick of the later part: more is better."""

    machines: int
    zones: int
    ticks: int
    spells: float
    hidden: float
    poisson: float
    hidden_counts: float
    poisson_counts: float

    def to_json(self) -> dict[str, Any]:
        return json_fields(self, "machines zones ticks spells hidden poisson hidden_counts poisson_counts")


def fit_zones(
    observed: Sequence[Observed], machines: int, *, half_life_h: float | None = HALF_LIFE_H
) -> list[tuple[AlternatingSpells, HiddenBulk]]:
    """Fit each zone, with the fit of all zones as its prior."""
    spells = AlternatingSpells.fit(observed, [machines], half_life_h=half_life_h)
    hidden = HiddenBulk.fit(observed, half_life_h=half_life_h)
    return [
        (
            AlternatingSpells.fit([one], [machines], half_life_h=half_life_h, prior=spells, prior_spells=_CLASS_SPELLS),
            HiddenBulk.fit([one], half_life_h=half_life_h, prior=hidden, prior_events=_CLASS_SPELLS),
        )
        for one in observed
    ]


def held_out(
    observed: Sequence[Observed], machines: int, *, share: float = SHARE, half_life_h: float | None = HALF_LIFE_H
) -> HeldOut:
    """Fit the first ``share`` of every zone and judge on the rest. The zones need one length of tick."""
    earlier = [one.split(share)[0] for one in observed]
    sums = np.zeros(5)
    fits = fit_zones(earlier, machines, half_life_h=half_life_h)
    for whole, part, (spells, hidden) in zip(observed, earlier, fits, strict=True):
        poisson = IndependentMachines.fit([part])
        models: tuple[HazardModel, ...] = (spells, hidden, poisson)
        gang = [m.loglik([whole], machines=machines) - m.loglik([part], machines=machines) for m in models]
        counts = [m.loglik_counts([whole]) - m.loglik_counts([part]) for m in (hidden, poisson)]
        sums += [*gang, *counts]
    ticks = sum(len(whole.up) - len(part.up) for whole, part in zip(observed, earlier, strict=True))
    names = ("spells", "hidden", "poisson", "hidden_counts", "poisson_counts")
    figures = dict(zip(names, (sums / ticks).tolist(), strict=True))
    return HeldOut(machines=machines, zones=len(observed), ticks=ticks, **figures)
