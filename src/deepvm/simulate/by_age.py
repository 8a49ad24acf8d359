"""Intervals by the age of a spell: a law of spells or a save policy in, the simulator's save times out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deepvm.errors import UsageError
from deepvm.market.hazard.alternating import AlternatingSpells
from deepvm.market.hazard.hyperexponential import Hyperexponential
from deepvm.market.hazard.observed import Observed, Spells, spells_of
from deepvm.policy.saving import YoungDalyByAge, daly_interval_s
from deepvm.simulate.saves import FixedInterval, IntervalsByAge, SaveTimes

_STEADY = 1e-4  # an interval that grows by less than this is the last
_MOST_SAVES = 100_000
_OLD_S = 1e9  # of a spell that is certainly a long one
_OFFSETS = (np.arange(20) + 0.5) / 20  # of a loss within its tick
_FREE_S = {"least_s": 1e-3, "most_s": 1e7}  # no limits of practice in a comparison of formulas


def policy_by_age(up: Hyperexponential, *, least_s: float = 1.0, most_s: float = 3600.0) -> YoungDalyByAge:
    """Return the save policy for spells of this law. Laws of more than two phases are refused."""
    if len(up.weights) > 2:
        raise UsageError(f"a policy by age needs spells of one or two phases, not of {len(up.weights)}")
    return YoungDalyByAge(
        short_share=up.weights[0] if len(up.weights) == 2 else 0.0,
        short_s=up.means_h[0] * 3600,
        long_s=up.means_h[-1] * 3600,
        least_s=least_s,
        most_s=most_s,
    )


def intervals_by_age(policy: YoungDalyByAge, *, stall_s: float, remote_s: float = 0.0) -> IntervalsByAge:
    """Ask the policy for every interval of a spell, until they no longer grow.

    The policy that a run holds decides the same: its age counts from the start of training.
    """
    intervals: list[float] = []
    age_s, last_s = 0.0, policy.after_s(_OLD_S, stall_s)
    while len(intervals) < _MOST_SAVES:
        wanted = policy.after_s(age_s, stall_s)
        intervals.append(wanted / 3600)
        if wanted >= last_s * (1 - _STEADY):
            break
        age_s += wanted + stall_s
    return IntervalsByAge(interval_h=np.array(intervals), stall_h=stall_s / 3600, remote_h=remote_s / 3600)


@dataclass(frozen=True, kw_only=True, slots=True)
class AgeWaste:
    """Hours of stalls and repeated work on later spells, with one interval for all ages and with intervals by age."""

    stall_s: float
    young_daly_h: float
    by_age_h: float

    @property
    def saved(self) -> float:
        """The share of the waste that intervals by age save."""
        return 1 - self.by_age_h / self.young_daly_h if self.young_daly_h > 0 else 0.0


def waste_h(saves: SaveTimes, spells: Spells) -> float:
    """Return the hours of these up spells that brought no progress. A loss is anywhere within its tick."""
    total = 0.0
    for offset in _OFFSETS:
        hours = np.where(spells.ended, (spells.ticks - offset) * spells.tick_h, spells.hours)
        total += float((hours - np.where(spells.ended, saves.safe(hours), saves.trained(hours))).sum())
    return total / len(_OFFSETS)


def age_waste(
    observed: Sequence[Observed],
    machines: int,
    stall_s: float,
    *,
    share: float = 0.6,
    half_life_h: float | None = None,
    class_spells: float = 5.0,
) -> AgeWaste:
    """Fit the first ``share`` of every zone, and compare on its later spells with Young/Daly at the gang's own rate."""
    parts = [one.split(share) for one in observed]
    pooled = AlternatingSpells.fit([early for early, _ in parts], [machines], half_life_h=half_life_h)
    fixed_h = by_age_h = 0.0
    for early, late in parts:
        seen, judged = (spells_of([part], machines, up=True) for part in (early, late))
        rate_per_h = max(1.0, float(seen.ended.sum())) / max(float(seen.hours.sum()), early.tick_s / 3600)
        interval_h = daly_interval_s(stall_s, rate_per_h / 3600) / 3600
        fit = AlternatingSpells.fit(
            [early], [machines], half_life_h=half_life_h, prior=pooled, prior_spells=class_spells
        )
        policy = policy_by_age(fit.spells(machines).up, **_FREE_S)
        fixed_h += waste_h(FixedInterval(interval_h=interval_h, stall_h=stall_s / 3600), judged)
        by_age_h += waste_h(intervals_by_age(policy, stall_s=stall_s), judged)
    return AgeWaste(stall_s=stall_s, young_daly_h=fixed_h, by_age_h=by_age_h)
