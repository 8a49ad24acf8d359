"""Choose a speedup curve: measured times by node count in; the best curve, its error and band, the next point out.

Every model of ``fit`` is a candidate, and Amdahl's law (universal scalability without coherency), which two points
determine. A candidate's error is that of points which its fit had to do without, as planners use the curve: in time,
and for a logistic by n × ScalingFactor. One machine is never left out: a speedup is relative to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike

from deepvm.errors import UsageError
from deepvm.performance.checks import Floats, check_number
from deepvm.performance.curves import MeasuredPoints, SpeedupCurve, UniversalScalability
from deepvm.performance.fit import fit

AMDAHL = "amdahl"
NOMINAL_GBPS = 100.0  # of a network whose rate is unknown: the fitted efficiency then stands for the rate itself
_NEAR = 0.02  # errors closer than this do not rank curves: the simpler one wins
# The fewest parameters first; measured points have as many as there are points, and say nothing beyond the last.
_SIMPLICITY = (AMDAHL, "all-reduce", "universal-scalability", "logistic", "measured")
_LEAST_POINTS = {AMDAHL: 2, "measured": 2}  # others: 3


@dataclass(frozen=True, kw_only=True, slots=True)
class CurveCandidate:
    """A model fitted to all points, and to all but one in turn."""

    name: str
    curve: SpeedupCurve
    errors: Mapping[int, float]  # relative, in time, signed, by the node count that was left out
    refits: tuple[SpeedupCurve, ...]

    @property
    def error(self) -> float | None:
        """The mean absolute error; None if no point could be left out."""
        return float(np.mean(np.abs(list(self.errors.values())))) if self.errors else None

    @property
    def worst_error(self) -> float | None:
        return max(map(abs, self.errors.values())) if self.errors else None

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "curve": self.curve.to_spec(),
            "error": self.error,
            "worst_error": self.worst_error,
            "errors": {str(nodes): error for nodes, error in self.errors.items()},
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class CurveChoice:
    """``candidates`` are ranked, the best first. ``next_nodes`` is the node count at which they disagree most."""

    nodes: tuple[int, ...]
    seconds: tuple[float, ...]  # of the same work
    candidates: tuple[CurveCandidate, ...]
    noise: float  # relative spread of the measured times
    next_nodes: int | None
    disagreement: float | None  # of the candidates there, largest time over smallest - 1

    @property
    def best(self) -> CurveCandidate:
        return self.candidates[0]

    def band(self, nodes: ArrayLike) -> tuple[Floats, Floats]:
        """Return the lowest and highest plausible speedup at each node count.

        The best curve's refits span it, widened by their error and the noise. If no point could be left out, all
        candidates span it: the points do not tell which one is right."""
        n = np.asarray(nodes, dtype=np.float64)
        tested = self.best.error is not None
        curves = [self.best.curve, *self.best.refits] if tested else [c.curve for c in self.candidates]
        speedups = np.stack([curve.speedup(n) for curve in curves])
        margin = np.where(n <= 1, self.noise, max(self.best.error or 0.0, self.noise))
        return speedups.min(axis=0) / (1 + margin), speedups.max(axis=0) * (1 + margin)

    @property
    def verdict(self) -> str:
        """One sentence: how sure the choice is."""
        count = len(self.nodes)
        if self.best.error is None:
            return f"{count} points do not test any curve: the band spans all candidates"
        tried = f"{self.best.name} predicts points that it has not seen within {self.best.error:.1%} on average"
        rival = next((c for c in self.candidates[1:] if c.error is not None), None)
        if rival is None:
            return f"{tried}, and no other curve could be tested with {count} points"
        close = (rival.error or 0.0) - self.best.error < max(_NEAR, self.noise)
        return f"{tried}; {rival.name} {'is as good' if close else 'is worse'} ({rival.error:.1%})"

    def to_json(self) -> dict[str, Any]:
        low, high = self.band(self.nodes)
        return {
            "best": self.best.name,
            "error": self.best.error,
            "verdict": self.verdict,
            "candidates": [c.to_json() for c in self.candidates],
            "band": [
                {"nodes": n, "low_speedup": float(a), "high_speedup": float(b)}
                for n, a, b in zip(self.nodes, low, high, strict=True)
            ],
            "next_nodes": self.next_nodes,
            "disagreement": self.disagreement,
        }


def choose_curve(
    nodes: Sequence[int],
    seconds: Sequence[float],
    *,
    gradient_bytes: float | None = None,
    sustained_gbps: float | None = None,
    noise: float = 0.0,
    most_nodes: int | None = None,
) -> CurveChoice:
    """Fit every model to the ``seconds`` of the same work on this many ``nodes``, and rank them by leaving points out.

    All-reduce is a candidate if ``gradient_bytes`` are known. ``most_nodes`` bounds the next point: twice the largest
    measured count by default.
    """
    check_number("the noise", noise, at_least=0)
    measured = cast(MeasuredPoints, fit("measured", nodes, seconds).curve)
    pairs = dict(zip(measured.nodes, measured.seconds, strict=True))
    known = {}
    if gradient_bytes:
        known = {"gradient_bytes": float(gradient_bytes), "sustained_gbps": sustained_gbps or NOMINAL_GBPS}
    names = [name for name in _SIMPLICITY if name != "all-reduce" or known]
    found = [c for c in (_candidate(name, pairs, known) for name in names) if c is not None]
    ranked = _ranked(found, noise)
    most = 2 * max(pairs) if most_nodes is None else most_nodes
    where, apart = _next_point(ranked, pairs, most, noise)
    return CurveChoice(
        nodes=measured.nodes,
        seconds=measured.seconds,
        candidates=ranked,
        noise=noise,
        next_nodes=where,
        disagreement=apart,
    )


def _candidate(name: str, pairs: Mapping[int, float], known: Mapping[str, float]) -> CurveCandidate | None:
    curve = _fitted(name, pairs, known)
    if curve is None:
        return None
    errors, refits = {}, []
    for left_out in pairs:
        rest = {n: s for n, s in pairs.items() if n != left_out}
        again = None if left_out == 1 else _fitted(name, rest, known)
        if again is not None:
            predicted = pairs[1] / float(again.speedup(np.array([left_out]))[0])
            errors[left_out] = predicted / pairs[left_out] - 1
            refits.append(again)
    return CurveCandidate(name=name, curve=curve, errors=errors, refits=tuple(refits))


def _fitted(name: str, pairs: Mapping[int, float], known: Mapping[str, float]) -> SpeedupCurve | None:
    """Fit one model; None if the points are too few, or no curve of it goes through them."""
    if len(pairs) < _LEAST_POINTS.get(name, 3):
        return None
    nodes, seconds = list(pairs), list(pairs.values())
    if name == AMDAHL:
        return _fit_amdahl(pairs)
    try:
        curve = fit(name, nodes, seconds, **(known if name == "all-reduce" else {})).curve
    except UsageError:  # the fitted parameters are out of the model's bounds
        return None
    return curve if (curve.speedup(np.array(nodes)) > 0).all() else None


def _fit_amdahl(pairs: Mapping[int, float]) -> UniversalScalability:
    """Fit sigma by least squares of relative errors: n s(n)/s(1) = 1 + sigma (n - 1) is linear in it."""
    n = np.array(list(pairs), dtype=np.float64)
    slowdown = n * np.array(list(pairs.values())) / pairs[1]
    x, y, weight = n - 1, slowdown - 1, 1 / slowdown**2
    sigma = float((weight * x * y).sum() / (weight * x * x).sum())
    return UniversalScalability(sigma=max(0.0, sigma), kappa=0.0, measured=(int(n.min()), int(n.max())))


def _ranked(found: Sequence[CurveCandidate], noise: float) -> tuple[CurveCandidate, ...]:
    """Rank by error; among those that the noise does not tell apart, the simplest first. Untested ones come last."""
    tested = [c for c in found if c.error is not None]
    if not tested:  # measured points claim the least
        return tuple(sorted(found, key=lambda c: -_SIMPLICITY.index(c.name)))
    least = min(c.error or 0.0 for c in tested)
    near = max(_NEAR, noise / 2)

    def key(c: CurveCandidate) -> tuple[float, float]:
        if c.error is None:
            return (2.0, _SIMPLICITY.index(c.name))
        return (0.0, _SIMPLICITY.index(c.name)) if c.error <= least + near else (1.0, c.error)

    return tuple(sorted(found, key=key))


def _next_point(
    ranked: Sequence[CurveCandidate], pairs: Mapping[int, float], most: int, noise: float
) -> tuple[int | None, float | None]:
    """Find the allowed count at which plausible candidates differ most; None if all allowed counts are measured."""
    allowed = np.array([n for n in range(2, min(most, 100_000) + 1) if n not in pairs])
    if not allowed.size:
        return None, None
    limit = 3 * (ranked[0].error or 0.0) + max(noise, 0.1)
    plausible = [c for c in ranked if c.error is None or c.error <= limit]
    curves = [c.curve for c in plausible] if len(plausible) > 1 else [*(c.curve for c in plausible), *ranked[0].refits]
    speedups = np.stack([curve.speedup(allowed) for curve in curves])
    apart = speedups.max(axis=0) / speedups.min(axis=0) - 1
    where = int(apart.argmax())
    return int(allowed[where]), float(apart[where])
