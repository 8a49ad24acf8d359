"""Spells of two phases, short and long: spells in; weights, means and the hazard at every age out.

A spell is seen in whole ticks: k ticks mean that it ended during tick k. In each phase that is a geometric law, so
the likelihood is exact for any length of tick, and so is the law of a spell that was under way when a trace began.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deepvm.errors import UsageError
from deepvm.market.hazard.observed import Spells

Floats = NDArray[np.float64]
_LEAST_H, _MOST_H = 1e-3, 24 * 365.0
_OLD_H = 1e12  # stands for an endless age
_ROUNDS = 400
_NEWTON = 25


@dataclass(frozen=True, kw_only=True, slots=True)
class Hyperexponential:
    """A spell is of phase i with probability ``weights[i]``, and then exponential with mean ``means_h[i]``."""

    weights: tuple[float, ...]
    means_h: tuple[float, ...]  # shortest first

    def __post_init__(self) -> None:
        if not self.weights or len(self.weights) != len(self.means_h):
            raise UsageError(f"{len(self.weights)} weights and {len(self.means_h)} means do not make a law of spells")
        if not all(w >= 0 for w in self.weights) or abs(sum(self.weights) - 1) > 1e-6:
            raise UsageError(f"the weights {self.weights} are not shares of one")
        if not all(0 < m < np.inf for m in self.means_h) or list(self.means_h) != sorted(self.means_h):
            raise UsageError(f"the means {self.means_h} h must be above zero, finite, and in rising order")

    @property
    def mean_h(self) -> float:
        return float(np.dot(self.weights, self.means_h))

    def _phases(self, age_h: ArrayLike) -> tuple[Floats, Floats]:
        """Return the chance of each phase at an age, along the last axis, and the logarithm of the survival."""
        age = np.clip(np.asarray(age_h, dtype=np.float64), 0.0, _OLD_H)[..., None]
        with np.errstate(divide="ignore"):
            logs = np.log(self.weights) - age / np.array(self.means_h)
        top = logs.max(axis=-1, keepdims=True)
        parts = np.exp(logs - top)
        total = parts.sum(axis=-1, keepdims=True)
        return parts / total, (top + np.log(total))[..., 0]

    def survival(self, age_h: ArrayLike) -> Floats:
        """Return the chance that a spell lasts longer than this."""
        return np.exp(self._phases(age_h)[1])

    def hazard_per_h(self, age_h: ArrayLike) -> Floats:
        """Return the rate at which spells of this age end. It falls with the age."""
        return np.asarray(self._phases(age_h)[0] @ (1 / np.array(self.means_h)))

    def remaining_h(self, age_h: ArrayLike) -> Floats:
        """Return how long a spell of this age will last on average."""
        return np.asarray(self._phases(age_h)[0] @ np.array(self.means_h))

    def remaining_survival(self, age_h: ArrayLike, further_h: ArrayLike) -> Floats:
        """Return the chance that a spell of this age lasts ``further_h`` more."""
        age, further = np.broadcast_arrays(np.asarray(age_h, float), np.asarray(further_h, float))
        return np.exp(self._phases(age + further)[1] - self._phases(age)[1])

    def sample(self, chance: np.random.Generator, size: int) -> Floats:
        """Draw the hours of spells."""
        phase = chance.choice(len(self.weights), size=size, p=np.array(self.weights) / sum(self.weights))
        return np.asarray(chance.exponential(np.array(self.means_h)[phase]))

    def loglik(self, spells: Spells) -> float:
        """Return the weighted log-probability of the numbers of ticks."""
        if not len(spells):
            return 0.0
        q = np.exp(-spells.tick_h[:, None] / np.array(self.means_h))
        return float(spells.weight @ _log_sum(_log_joint(spells, np.array(self.weights), q)))


def _log_joint(spells: Spells, weights: Floats, q: Floats) -> Floats:
    """Return [spell, phase]: log-probability of the phase and the ticks. ``q`` is the chance to survive a tick."""
    with np.errstate(divide="ignore"):
        biased = weights / np.maximum(1e-300, 1 - q)  # a spell under way is met by its length
        first = np.where(spells.began[:, None], weights, biased / biased.sum(axis=1, keepdims=True))
        last = np.where(spells.ended[:, None], np.log(np.maximum(1e-300, 1 - q)), 0.0)
        return np.asarray(np.log(first) + (spells.ticks[:, None] - 1) * np.log(np.maximum(1e-300, q)) + last)


def _log_sum(logs: Floats) -> Floats:
    top = logs.max(axis=1, keepdims=True)
    return np.asarray((top + np.log(np.exp(logs - top).sum(axis=1, keepdims=True)))[:, 0])


TYPICAL_UP = Hyperexponential(weights=(0.6, 0.4), means_h=(0.5, 8.0))
TYPICAL_DOWN = Hyperexponential(weights=(0.65, 0.35), means_h=(0.4, 4.0))


def fit_spells(spells: Spells, *, prior: Hyperexponential, prior_spells: float = 2.0) -> Hyperexponential:
    """Fit the law by expectation and maximisation. The prior counts as this many spells, so that a fit always exists.

    A spell that did not end counts with its survival. One that was under way at the first tick counts by its length.
    """
    if not prior_spells > 0:
        raise UsageError(f"prior_spells is {prior_spells}: it must be above zero")
    weights, means = np.array(prior.weights), np.array(prior.means_h)
    if not len(spells) or not spells.weight.sum() > 0:
        return prior
    spells = _grouped(spells)
    candidates = [_maximise(spells, weights, means, prior, prior_spells)]
    hours = spells.hours
    short, long = np.quantile(hours, (0.25, 0.9))
    if len(prior.weights) == 2 and long > 1.5 * short:
        own = np.array([short, max(long, 2 * short)])
        candidates.append(_maximise(spells, weights, own, prior, prior_spells))
    return max(candidates, key=lambda pair: pair[1])[0]


def _grouped(spells: Spells) -> Spells:
    """Merge spells that look alike: their weights add up."""
    rows = np.stack([spells.ticks, spells.tick_h, spells.began, spells.ended], axis=1)
    unique, at = np.unique(rows, axis=0, return_inverse=True)
    return Spells(
        ticks=unique[:, 0].astype(np.int64),
        tick_h=unique[:, 1],
        began=unique[:, 2].astype(bool),
        ended=unique[:, 3].astype(bool),
        weight=np.bincount(at.ravel(), spells.weight, len(unique)).astype(np.float64),
    )


def _maximise(
    spells: Spells, weights: Floats, means: Floats, prior: Hyperexponential, strength: float
) -> tuple[Hyperexponential, float]:
    prior_events = strength * np.array(prior.weights)
    prior_hours = prior_events * np.array(prior.means_h)
    ticks_h, which = np.unique(spells.tick_h, return_inverse=True)
    waited = (spells.ticks - 1) * spells.tick_h
    before = -np.inf
    for _ in range(_ROUNDS):
        logs = _log_joint(spells, weights, np.exp(-spells.tick_h[:, None] / means))
        sums = _log_sum(logs)
        value = float(spells.weight @ sums) + float(prior_events @ (np.log(weights + 1e-300) - np.log(means)))
        value -= float(prior_hours @ (1 / means))
        share = np.exp(logs - sums[:, None]) * spells.weight[:, None]
        began = share[spells.began].sum(axis=0) + prior_events
        events = np.zeros((len(ticks_h), len(means)))
        np.add.at(events, which.ravel(), share * spells.ended[:, None])
        means = 1 / _rates(events, ticks_h, prior_events, waited @ share + prior_hours, 1 / means)
        weights = began / began.sum()
        if abs(value - before) < 1e-9 * (1 + abs(value)):
            break
        before = value
    order = np.argsort(means, kind="stable")
    fitted = Hyperexponential(weights=tuple(weights[order].tolist()), means_h=tuple(means[order].tolist()))
    return fitted, value


def _rates(events: Floats, ticks_h: Floats, prior_events: Floats, hours: Floats, rate: Floats) -> Floats:
    """Solve, phase by phase: sum of events × tick / (exp(rate × tick) - 1) + prior events / rate = hours."""
    for _ in range(_NEWTON):
        x = np.clip(rate * ticks_h[:, None], 1e-12, 300.0)
        grown = np.expm1(x)
        value = (events * ticks_h[:, None] / grown).sum(axis=0) + prior_events / rate - hours
        slope = (-events * ticks_h[:, None] ** 2 * (grown + 1) / grown**2).sum(axis=0) - prior_events / rate**2
        step = np.clip(-value / (slope * rate), -1.0, 1.0)  # of the logarithm, which keeps the rate above zero
        rate = np.clip(rate * np.exp(step), 1 / _MOST_H, 1 / _LEAST_H)
        if np.abs(step).max() < 1e-10:
            break
    return np.asarray(rate)
