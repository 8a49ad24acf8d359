"""Fit curves to measurements: node counts and times of the same work in, a curve of ``curves`` and its error out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from deepvm.errors import UnknownName, UsageError
from deepvm.performance.allreduce import AllReduce
from deepvm.performance.checks import Floats, check_number
from deepvm.performance.curves import Logistic, MeasuredPoints, SpeedupCurve, UniversalScalability


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """``worst_relative_error`` is the speedup's over all points; for a logistic, that of S(n)."""

    curve: SpeedupCurve
    worst_relative_error: float


def fit(model: str, nodes: Sequence[int], seconds: Sequence[float], **known: float) -> Fit:
    """Fit a model to the ``seconds`` that the same work took on this many ``nodes``, one machine among them.

    ``logistic`` is fitted to speedups by least squares, as DeepVM does; ``universal-scalability`` and
    ``all-reduce`` by least squares of relative errors; ``measured`` keeps the points. ``all-reduce`` has to
    know ``gradient_bytes`` and ``sustained_gbps``, and ``steps``, the number of steps that make up the time
    of one machine (1 unless given): n machines share them, so the work takes steps/n × t(n). Whether compute hides a
    part of the exchange is decided by cross-validation: each point is predicted from the others.
    """
    fitter = _FITTERS.get(model)
    if fitter is None:
        raise UnknownName("speedup model", model, _FITTERS)
    unknown = [name for name in known if name not in fitter.known]
    if unknown:
        raise UnknownName(f"known figure of {model}", unknown[0], fitter.known)
    for name, value in known.items():
        check_number(name, value, above=0)
    pairs = list(zip(nodes, seconds, strict=False))
    if len(nodes) != len(seconds) or len(pairs) < fitter.points:
        raise UsageError(
            f"{model} needs at least {fitter.points} node counts with a time each:"
            f" found {len(nodes)} counts and {len(seconds)} times"
        )
    return fitter.run(_points(pairs), known)


def _points(pairs: Sequence[tuple[int, float]]) -> MeasuredPoints:
    """Sort the pairs into points, each node count once."""
    for count, time_s in pairs:
        check_number("a node count", count, at_least=1)
        check_number("a time in seconds", time_s, above=0)
    ordered = sorted(pairs)
    counts = [count for count, _ in ordered]
    twice = next((a for a, b in pairwise(counts) if a == b), None)
    if twice is not None:
        raise UsageError(f"{twice} nodes were measured twice: give one time, such as their mean")
    return MeasuredPoints(nodes=tuple(counts), seconds=tuple(time_s for _, time_s in ordered))


def _fit_points(points: MeasuredPoints, _known: Mapping[str, float]) -> Fit:
    return Fit(curve=points, worst_relative_error=0.0)


def _fit_logistic(points: MeasuredPoints, _known: Mapping[str, float]) -> Fit:
    n, speedups = _arrays(points)
    top, widest = float(speedups.max()), float(n.max())

    def curve(x: Floats) -> Logistic:
        return Logistic(a=float(x[0]), b=float(x[1]), c=float(x[2]), measured=points.measured)

    best, _ = _least_squares(
        lambda x: curve(x).published_speedup(n) - speedups,
        # From a bend in the middle of the range and from one at its end: data that still rise show no bend.
        starts=[(4.0 / widest, widest / 2, top), (4.0 / widest, widest, 2 * top)],
        low=(1e-6, -10 * widest, 1e-6),
        high=(100.0, 10 * widest, 1000 * top),
    )
    fitted = curve(best)
    return Fit(curve=fitted, worst_relative_error=_worst(fitted.published_speedup(n), speedups))


def _fit_universal_scalability(points: MeasuredPoints, _known: Mapping[str, float]) -> Fit:
    n, speedups = _arrays(points)

    def curve(x: Floats) -> UniversalScalability:
        return UniversalScalability(sigma=float(x[0]), kappa=float(x[1]), measured=points.measured)

    best, _ = _least_squares(
        lambda x: np.log(curve(x).speedup(n) / speedups),
        starts=[(0.1, 0.001), (0.01, 0.1)],
        low=(0.0, 0.0),
        high=(1e6, 1e6),
    )
    fitted = curve(np.where(best < 1e-9, 0.0, best))  # the solver only approaches a bound
    return Fit(curve=fitted, worst_relative_error=_worst(fitted.speedup(n), speedups))


def _fit_all_reduce(points: MeasuredPoints, known: Mapping[str, float]) -> Fit:
    missing = [name for name in ("gradient_bytes", "sustained_gbps") if name not in known]
    if missing:
        raise UsageError(f"all-reduce is fitted to a known job and network: give {' and '.join(missing)}")
    n, speedups = _arrays(points)
    compute_s = points.seconds[0] / known.get("steps", 1.0)

    def curve(x: Floats) -> AllReduce:
        return AllReduce(
            compute_s=compute_s,
            gradient_bytes=known["gradient_bytes"],
            sustained_gbps=known["sustained_gbps"],
            efficiency=min(1.0, math.exp(x[0])),
            latency_s=math.exp(x[1]),
            overlap=round(float(x[2]), 9) if len(x) > 2 else 0.0,
            measured=points.measured,
        )

    def residuals(x: Floats) -> Floats:
        return np.log(curve(x).speedup(n) / speedups)

    # Both span decades, so they are fitted as logarithms; a nanosecond of latency means zero.
    network, network_low, network_high = (
        (math.log(0.5), math.log(1e-3)),
        (math.log(1e-4), math.log(1e-9)),
        (0.0, 5.0),
    )
    best, _ = _least_squares(residuals, starts=[network], low=network_low, high=network_high)
    if len(n) > 4:  # one point checks what the others say, and three of these have a network
        low, high = (*network_low, 0.0), (*network_high, 1.0)
        starts = [(*network, share) for share in (0.1, 0.5, 0.9)]
        overlapped, _ = _least_squares(residuals, starts=starts, low=low, high=high)
        without = _left_out_error(residuals, best, low=network_low, high=network_high)
        if _left_out_error(residuals, overlapped, low=low, high=high) < without:
            best = overlapped
    fitted = curve(best)
    return Fit(curve=fitted, worst_relative_error=_worst(fitted.speedup(n), speedups))


def _left_out_error(
    residuals: Callable[[Floats], Floats], best: Floats, *, low: tuple[float, ...], high: tuple[float, ...]
) -> float:
    """Return the mean square error of points that a fit to the others predicts. The first, one machine, stays."""
    count = len(residuals(best))
    errors = []
    for out in range(1, count):
        kept = np.arange(count) != out
        others, _ = _least_squares(
            lambda x, kept=kept: residuals(x)[kept],  # type: ignore[misc]
            starts=[tuple(best)],
            low=low,
            high=high,
        )
        errors.append(float(residuals(others)[out]) ** 2)
    return math.fsum(errors) / len(errors)


def _least_squares(
    residuals: Callable[[Floats], Floats],
    *,
    starts: Sequence[tuple[float, ...]],
    low: tuple[float, ...],
    high: tuple[float, ...],
) -> tuple[Floats, float]:
    """Return the best result of several starts, and its sum of squares."""
    from scipy.optimize import least_squares  # slow to import, and only fits need it

    results = [
        least_squares(residuals, np.clip(start, low, high), bounds=(low, high), x_scale="jac") for start in starts
    ]
    best = min(results, key=lambda result: float(result.cost))
    return np.asarray(best.x, dtype=np.float64), 2.0 * float(best.cost)


def _arrays(points: MeasuredPoints) -> tuple[Floats, Floats]:
    n = np.asarray(points.nodes, dtype=np.float64)
    return n, points.speedup(n)


def _worst(predicted: Floats, measured: Floats) -> float:
    return float(np.abs(predicted / measured - 1.0).max())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fitter:
    run: Callable[[MeasuredPoints, Mapping[str, float]], Fit]
    points: int  # one per parameter, and one more if the time of one machine does not inform it
    known: tuple[str, ...] = ()


_FITTERS: Mapping[str, _Fitter] = {
    MeasuredPoints.model: _Fitter(run=_fit_points, points=2),
    Logistic.model: _Fitter(run=_fit_logistic, points=3),
    UniversalScalability.model: _Fitter(run=_fit_universal_scalability, points=3),
    AllReduce.model: _Fitter(run=_fit_all_reduce, points=3, known=("gradient_bytes", "sustained_gbps", "steps")),
}
