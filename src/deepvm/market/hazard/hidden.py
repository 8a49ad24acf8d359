"""A hidden state of the market, plenty, tight or none, with its own drops and rises in bulk. Counts in, markets out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepvm.errors import UsageError
from deepvm.market.hazard.bulk import BulkKernel
from deepvm.market.hazard.chains import balance, gang_loglik, spell_pair
from deepvm.market.hazard.drawing import draw
from deepvm.market.hazard.model import SpellPair
from deepvm.market.hazard.observed import Observed
from deepvm.market.hazard.smoothing import log_evidence, smooth
from deepvm.market.trace import Counts

Floats = NDArray[np.float64]
STATES = ("plenty", "tight", "none")
_ROUNDS = 60
_TOLERANCE = 1e-6  # of the log-likelihood of a tick
_PRIOR_EVENTS = 2.0


@dataclass(frozen=True, kw_only=True)
class HiddenBulk:
    """``change`` is [state, next state] in one tick; ``kernels`` are those of ``STATES``."""

    change: tuple[tuple[float, ...], ...]
    kernels: tuple[BulkKernel, ...]
    machines: int
    tick_s: float

    def __post_init__(self) -> None:
        rows = np.array(self.change)
        if rows.shape != (len(self.kernels),) * 2 or (rows < 0).any() or (abs(rows.sum(axis=1) - 1) > 1e-6).any():
            raise UsageError("the changes of a hidden state are not rows of chances, one for each state")
        if self.machines < 1 or not self.tick_s > 0:
            raise UsageError(f"{self.machines} machines and ticks of {self.tick_s} s: both must be above zero")

    @classmethod
    def typical(cls, *, machines: int, tick_s: float) -> HiddenBulk:
        """What is assumed before anything was observed."""
        tick_h = tick_s / 3600

        def chance(mean_h: float) -> float:
            return float(min(0.45, -np.expm1(-tick_h / mean_h)))

        sizes = (0.5, 0.2, 0.3)
        events_h = ((12.0, 0.4), (0.7, 0.7), (0.5, 8.0))  # between drops, and between rises
        kernels = tuple(
            BulkKernel(drop=chance(drop_h), rise=chance(rise_h), drop_sizes=sizes, rise_sizes=sizes)
            for drop_h, rise_h in events_h
        )
        leave = [chance(h) for h in (12.0, 3.0, 8.0)]
        onwards = ((0.0, 0.8, 0.2), (0.5, 0.0, 0.5), (0.2, 0.8, 0.0))
        rows = tuple(tuple(1 - leave[i] if i == j else leave[i] * onwards[i][j] for j in range(3)) for i in range(3))
        return cls(change=rows, kernels=kernels, machines=machines, tick_s=tick_s)

    @classmethod
    def fit(
        cls,
        observed: Sequence[Observed],
        *,
        half_life_h: float | None = None,
        prior: HiddenBulk | None = None,
        prior_events: float = _PRIOR_EVENTS,
    ) -> HiddenBulk:
        """Pool zones with one length of tick and fit them (Baum-Welch). ``half_life_h``: recent ticks count more."""
        if not observed:
            raise UsageError("a hazard needs at least one zone that was observed")
        machines, tick_s = max(one.machines for one in observed), observed[0].tick_s
        base = prior or cls.typical(machines=machines, tick_s=tick_s)
        model, before = cls(change=base.change, kernels=base.kernels, machines=machines, tick_s=tick_s), -np.inf
        ticks = sum(len(one.up) - 1 for one in observed)
        for _ in range(_ROUNDS):
            model, value = model._improved(observed, half_life_h, base, prior_events)
            if value - before < _TOLERANCE * max(1, ticks):
                break
            before = value
        return model

    def _improved(
        self, observed: Sequence[Observed], half_life_h: float | None, base: HiddenBulk, prior_events: float
    ) -> tuple[HiddenBulk, float]:
        states, size = len(self.kernels), self.machines + 1
        change, matrices = np.array(self.change), self._matrices()
        moves, pairs, values = np.zeros((states, states)), np.zeros((states, size * size)), list[float]()
        start = balance(change)
        for one in observed:
            evidence = self._evidence(one, matrices)
            if not len(evidence):
                continue
            values.append(log_evidence(start, change, evidence))
            past, future = smooth(start, change, evidence)
            joint = past[:, :, None] * change * (evidence * future)[:, None, :]
            joint /= np.maximum(joint.sum(axis=(1, 2), keepdims=True), 1e-300)
            if half_life_h is not None:
                age_h = np.arange(len(evidence))[::-1] * one.tick_s / 3600
                joint *= (0.5 ** (age_h / half_life_h))[:, None, None]
            moves += joint.sum(axis=0)
            at = one.up[:-1].astype(np.int64) * size + one.up[1:]
            now = joint.sum(axis=1)
            for state in range(states):
                pairs[state] += np.bincount(at, now[:, state], size * size)
        rows = np.array(base.change)
        moves += rows * (prior_events / (1 - np.diag(rows)))[:, None]
        moves /= moves.sum(axis=1, keepdims=True)
        kernels = tuple(
            kernel.updated(pairs[i].reshape(size, size), base.kernels[i], prior_events)
            for i, kernel in enumerate(self.kernels)
        )
        change_rows = tuple(tuple(row) for row in moves.tolist())
        return HiddenBulk(change=change_rows, kernels=kernels, machines=self.machines, tick_s=self.tick_s), sum(values)

    def _matrices(self) -> Floats:
        return np.stack([kernel.matrix(self.machines) for kernel in self.kernels])

    def _check(self, one: Observed) -> None:
        if abs(one.tick_s - self.tick_s) > 1e-6:
            raise UsageError(f"{one.zone} has ticks of {one.tick_s:g} s, the model {self.tick_s:g} s: resample it")
        if one.machines > self.machines:
            raise UsageError(f"{one.zone} has {one.machines} machines, the model was fitted to {self.machines}")

    def _evidence(self, one: Observed, matrices: Floats) -> Floats:
        self._check(one)
        return np.asarray(matrices[:, one.up[:-1], one.up[1:]].T)

    def chain(self) -> Floats:
        """Return the transitions of (state, machines up), in one tick."""
        size = self.machines + 1
        joint = np.array(self.change)[:, None, :, None] * np.moveaxis(self._matrices(), 0, 1)[None]
        return joint.reshape(len(self.kernels) * size, -1)

    def _up(self, machines: int) -> NDArray[np.bool_]:
        return np.tile(np.arange(self.machines + 1) >= machines, len(self.kernels))

    def loglik(self, observed: Sequence[Observed], *, machines: int) -> float:
        chain, up = self.chain(), self._up(machines)
        for one in observed:
            self._check(one)
        return sum(gang_loglik(chain, up, one, machines) for one in observed)

    def loglik_counts(self, observed: Sequence[Observed]) -> float:
        """Return the log-probability of the machines up by tick, given the first."""
        matrices, change = self._matrices(), np.array(self.change)
        joint = balance(self.chain()).reshape(len(self.kernels), -1)
        total = 0.0
        for one in observed:
            evidence = self._evidence(one, matrices)
            start = joint[:, one.up[0]] / max(float(joint[:, one.up[0]].sum()), 1e-300)
            total += log_evidence(start, change, evidence)
        return total

    def spells(self, machines: int) -> SpellPair:
        return spell_pair(self.chain(), self._up(machines), self.tick_s / 3600)

    def sample(
        self, chance: np.random.Generator, *, zones: int, ticks: int, tick_s: float, machines: int | None = None
    ) -> Counts:
        """Draw capacities of up to ``machines`` machines: the same law of drops, for any number."""
        if abs(tick_s - self.tick_s) > 1e-6:
            raise UsageError(f"the model was fitted to ticks of {self.tick_s:g} s, it cannot draw ticks of {tick_s:g}")
        return draw(chance, [self] * zones, machines=machines or self.machines, ticks=ticks)
