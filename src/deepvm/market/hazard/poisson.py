"""Independent machines, for checks: each is lost and comes back at a constant rate, alone. Real ones go in bulk."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from deepvm.errors import UsageError
from deepvm.market.hazard.chains import gang_loglik, spell_pair
from deepvm.market.hazard.hyperexponential import TYPICAL_DOWN, TYPICAL_UP
from deepvm.market.hazard.model import SpellPair
from deepvm.market.hazard.observed import Observed
from deepvm.market.trace import Counts

Floats = NDArray[np.float64]
_ROUNDS = 60
_MOST_MACHINES = 128  # the table of transitions has its cube
_LEAST = 1e-12


@dataclass(frozen=True, kw_only=True)
class IndependentMachines:
    """``lost_per_h`` of each machine that is up, ``back_per_h`` of each that is down."""

    lost_per_h: float
    back_per_h: float
    machines: int
    tick_h: float

    def __post_init__(self) -> None:
        if not (self.lost_per_h > 0 and self.back_per_h > 0 and self.tick_h > 0):
            raise UsageError(f"rates of {self.lost_per_h} and {self.back_per_h} per hour must be above zero")
        if not 1 <= self.machines <= _MOST_MACHINES:
            raise UsageError(f"{self.machines} machines are not 1 to {_MOST_MACHINES}: thin the trace out")

    @classmethod
    def fit(cls, observed: Sequence[Observed], *, prior_spells: float = 2.0) -> IndependentMachines:
        """Fit by expectation and maximisation: machines lost and back within one tick are not seen one by one.

        The prior is that of the other models: this many spells of typical length."""
        if not observed:
            raise UsageError("a hazard needs at least one zone that was observed")
        tick_s, machines = observed[0].tick_s, max(one.machines for one in observed)
        if any(abs(one.tick_s - tick_s) > 1e-9 for one in observed):
            raise UsageError("independent machines are fitted to zones with one length of tick")
        pairs = np.zeros((machines + 1, machines + 1))
        for one in observed:
            np.add.at(pairs, (one.up[:-1], one.up[1:]), 1.0)
        lost, back = 0.02, 0.02
        prior_up = prior_spells * TYPICAL_UP.mean_h * 3600 / tick_s
        prior_down = prior_spells * TYPICAL_DOWN.mean_h * 3600 / tick_s
        up_ticks = float((pairs.sum(axis=1) * np.arange(machines + 1)).sum())
        down_ticks = float(pairs.sum() * machines - up_ticks)
        for _ in range(_ROUNDS):
            losses, returns = _expected(pairs, machines, lost, back)
            lost = min(0.999, (losses + prior_spells) / (up_ticks + prior_up))
            back = min(0.999, (returns + prior_spells) / (down_ticks + prior_down))
        tick_h = tick_s / 3600
        return cls(
            lost_per_h=-math.log1p(-lost) / tick_h,
            back_per_h=-math.log1p(-back) / tick_h,
            machines=machines,
            tick_h=tick_h,
        )

    @cached_property
    def chain(self) -> Floats:
        return np.asarray(_joint(self.machines, *self._chances()).sum(axis=2))

    def _chances(self) -> tuple[float, float]:
        return -math.expm1(-self.lost_per_h * self.tick_h), -math.expm1(-self.back_per_h * self.tick_h)

    def _check(self, observed: Observed) -> None:
        if abs(observed.tick_s / 3600 - self.tick_h) > 1e-9:
            raise UsageError(f"{observed.zone} has ticks of {observed.tick_s:g} s, the model {self.tick_h * 3600:g} s")
        if observed.machines > self.machines:
            raise UsageError(
                f"{observed.zone} has {observed.machines} machines, the model was fitted to {self.machines}"
            )

    def loglik(self, observed: Sequence[Observed], *, machines: int) -> float:
        up = np.arange(self.machines + 1) >= machines
        for one in observed:
            self._check(one)
        return sum(gang_loglik(self.chain, up, one, machines) for one in observed)

    def loglik_counts(self, observed: Sequence[Observed]) -> float:
        """Return the log-probability of the machines up by tick, given the first."""
        total = 0.0
        for one in observed:
            self._check(one)
            total += float(np.log(np.maximum(self.chain[one.up[:-1], one.up[1:]], 1e-300)).sum())
        return total

    def spells(self, machines: int) -> SpellPair:
        return spell_pair(self.chain, np.arange(self.machines + 1) >= machines, self.tick_h)

    def sample(self, chance: np.random.Generator, *, zones: int, ticks: int, tick_s: float) -> Counts:
        lost, back = -math.expm1(-self.lost_per_h * tick_s / 3600), -math.expm1(-self.back_per_h * tick_s / 3600)
        counts = np.zeros((zones, ticks), np.int32)
        counts[:, 0] = chance.binomial(self.machines, back / (lost + back), zones)
        for tick in range(1, ticks):
            before = counts[:, tick - 1]
            counts[:, tick] = before - chance.binomial(before, lost) + chance.binomial(self.machines - before, back)
        return counts


def _joint(machines: int, lost: float, back: float) -> Floats:
    """Return [before, after, losses]: the chance of a transition with this many losses in it."""
    size = np.arange(machines + 1)
    factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, machines + 1)))])
    losses = _binomial(size[:, None], size[None, :], lost, factorials)  # [before, losses]
    returns = _binomial(machines - size[:, None], size[None, :], back, factorials)  # [before, returns]
    came = size[None, :, None] - size[:, None, None] + size[None, None, :]  # after - before + losses
    possible = (came >= 0) & (came <= machines)
    chances = returns[size[:, None, None], np.clip(came, 0, machines)]
    return np.where(possible, losses[:, None, :] * chances, 0.0)


def _binomial(count: NDArray[np.int64], k: NDArray[np.int64], chance: float, factorials: Floats) -> Floats:
    possible = k <= count
    rest = np.where(possible, count - k, 0)
    logs = factorials[count] - factorials[k] - factorials[rest]
    logs = logs + k * math.log(max(chance, _LEAST)) + rest * math.log1p(-min(chance, 1 - _LEAST))
    return np.where(possible, np.exp(logs), 0.0)


def _expected(pairs: Floats, machines: int, lost: float, back: float) -> tuple[float, float]:
    """Return the expected losses and returns of all transitions."""
    joint = _joint(machines, lost, back)
    size = np.arange(machines + 1)
    mean = (joint * size).sum(axis=2) / np.maximum(joint.sum(axis=2), 1e-300)
    losses = float((pairs * mean).sum())
    returns = float((pairs * (mean + size[None, :] - size[:, None])).sum())
    return losses, max(0.0, returns)
