"""Markov chains on counts of machines: matrices in; balance, likelihoods and laws of spells out."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from deepvm.market.hazard.hyperexponential import TYPICAL_DOWN, TYPICAL_UP, Hyperexponential, fit_spells
from deepvm.market.hazard.model import SpellPair
from deepvm.market.hazard.observed import Observed, Spells

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
_LEAST = 1e-300
_LEAST_EXIT = 1e-100  # of a state that is never left
_TAIL = 1e-4  # spells are followed until so few are left
_MOST_TICKS = 4_000  # what is left then counts as not ended
_AS_MANY = 2_000.0  # spells that an exact law counts as against the prior of a fit


def balance(chain: Floats) -> Floats:
    """Return the stationary distribution of a transition matrix.

    Grassmann, Taksar and Heyman's elimination subtracts nothing: even a state of probability 1e-16 has its digits."""
    rest, size = np.array(chain, dtype=np.float64), len(chain)
    for last in range(size - 1, 0, -1):
        rest[:last, last] /= max(float(rest[last, :last].sum()), _LEAST_EXIT)
        rest[:last, :last] += np.outer(rest[:last, last], rest[last, :last])
    found = np.ones(size)
    for state in range(1, size):
        found[state] = found[:state] @ rest[:state, state]
    return np.asarray(found / found.sum())


def gang_loglik(chain: Floats, up: Flags, observed: Observed, machines: int) -> float:
    """Return the log-probability of "the gang is up" by tick, given the first; ``up`` marks the chain's states."""
    seen = observed.gang(machines)
    start = balance(chain)
    state = np.where(up == seen[0], start, 0.0)
    if not state.sum() > 0:
        state = (up == seen[0]).astype(float)
    state /= state.sum()
    masked = {level: chain * (up == level) for level in (True, False)}
    total = 0.0
    changes = np.concatenate([[1], np.flatnonzero(seen[2:] != seen[1:-1]) + 2, [len(seen)]])
    for first, last in pairwise(changes.tolist()):
        step = masked[bool(seen[first])] if first < len(seen) else chain
        for _ in range(last - first):
            state = state @ step
            sum_ = max(float(state.sum()), _LEAST)
            total += float(np.log(sum_))
            state = state / sum_
    return total


def spell_pair(chain: Floats, up: Flags, tick_h: float) -> SpellPair:
    """Return the nearest laws of two phases for the time that a chain spends among its up states, and outside."""
    if up.all() or not up.any():
        return SpellPair(up=TYPICAL_UP, down=TYPICAL_DOWN)
    start = balance(chain)
    laws = [_law(chain, inside, start, tick_h, prior) for inside, prior in ((up, TYPICAL_UP), (~up, TYPICAL_DOWN))]
    return SpellPair(up=laws[0], down=laws[1])


def _law(chain: Floats, inside: Flags, start: Floats, tick_h: float, prior: Hyperexponential) -> Hyperexponential:
    enter = (start * ~inside) @ chain * inside
    state = (enter / max(float(enter.sum()), _LEAST))[inside]
    step = chain[np.ix_(inside, inside)]
    alive = [1.0]
    while alive[-1] > _TAIL and len(alive) < _MOST_TICKS:
        state = state @ step
        alive.append(float(state.sum()))
    survival = np.array(alive)
    chances = np.append(survival[:-1] - survival[1:], survival[-1])
    spells = Spells(
        ticks=np.arange(1, len(chances) + 1),
        tick_h=np.full(len(chances), tick_h),
        began=np.ones(len(chances), bool),
        ended=np.arange(len(chances)) < len(chances) - 1,
        weight=np.maximum(0.0, chances) * _AS_MANY,
    )
    return fit_spells(spells, prior=prior, prior_spells=0.1)
