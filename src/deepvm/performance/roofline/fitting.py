"""Fit a roofline: measured steps of some machines in, shares of their peaks and the error of leaving one out, out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from deepvm.errors import UsageError
from deepvm.performance.checks import Floats
from deepvm.performance.roofline.model import TERMS, Roofline, RooflinePoint, features, step_seconds

SHARPNESS = (1.0, 2.0, 8.0)  # of the knee: 1 adds arithmetic and traffic up, 8 is almost the larger of both
_PRIOR = 0.5  # how far a share may be from the known one: a factor of 1.6 costs as much as an error of _NOISE
_NOISE = 0.1  # the relative error of a measured step


def fit_roofline(points: Sequence[RooflinePoint], *, near: Roofline | None = None) -> Roofline:
    """Fit the shares to measured steps, by least squares of relative errors, and test them by leaving one out.

    ``near`` is a roofline whose shares are likely: with it, a single point suffices. Without it, every term that the
    points have needs a point, and a further one per ``relative_to``.
    """
    if not points:
        raise UsageError("a roofline needs at least one measured step: deepvm calibrate compute")
    terms = _terms(points, near)
    if near is None and len(points) < terms + len(_groups(points)):
        raise UsageError(f"{len(points)} measured steps do not determine a roofline of {terms} terms: measure more")
    tried = [_fit_one(points, near, sharpness) for sharpness in (SHARPNESS if near is None else (near.sharpness,))]
    tested = [replace(made, leave_one_out=_leave_one_out(points, near, made.sharpness)) for made, _ in tried]
    losses = [loss for _, loss in tried]
    ranked = [t.uncertainty if t.leave_one_out else loss for t, loss in zip(tested, losses, strict=True)]
    # A sharper knee has to earn its place: with few points all shapes fit alike.
    best = min(range(len(tested)), key=lambda i: (ranked[i] * (1.0 if i == 0 else 1.05), i))
    return tested[best]


def _leave_one_out(points: Sequence[RooflinePoint], near: Roofline | None, sharpness: float) -> dict[str, float]:
    devices = list(dict.fromkeys(p.peaks.device for p in points))
    by_point = len(devices) == 1
    errors: dict[str, float] = {}
    names = [p.label or f"{p.peaks.device} {i + 1}" for i, p in enumerate(points)] if by_point else devices
    for i, name in enumerate(names):
        out = [points[i]] if by_point else [p for p in points if p.peaks.device == name]
        rest = [p for p in points if not any(p is one for one in out)]
        if not rest or (near is None and len(rest) < _terms(rest, near) + len(_groups(rest))):
            continue
        if {p.relative_to for p in out} - {p.relative_to for p in rest} - {None}:
            continue  # nothing else knows their common factor
        made = _fit(rest, near, sharpness)
        ratios = [made.seconds(p.load, p.peaks, p.relative_to) / p.step_s for p in out]
        errors[name] = float(np.exp(np.mean(np.log(ratios)))) - 1
    return errors


def _fit_one(points: Sequence[RooflinePoint], near: Roofline | None, sharpness: float) -> tuple[Roofline, float]:
    made = _fit(points, near, sharpness)
    ratios = [made.seconds(p.load, p.peaks, p.relative_to) / p.step_s for p in points]
    return made, float(np.sqrt(np.mean(np.log(ratios) ** 2)))


def _fit(points: Sequence[RooflinePoint], near: Roofline | None, sharpness: float) -> Roofline:
    """Return the shares, and the factor of each group of relative points."""
    from scipy.optimize import least_squares, nnls  # slow to import, and only fits need it

    columns = features([(p.load, p.peaks) for p in points])
    seconds = np.array([p.step_s for p in points])
    groups = _groups(points)
    member = np.array([[p.relative_to == g for g in groups] for p in points], dtype=np.float64).reshape(len(points), -1)
    active = [i for i in range(len(TERMS)) if columns[:, i].any()]
    known = None if near is None else near.rates()
    # The start: all terms add up, and a group's first guess of its factor makes its times sum to the roofline's.
    absolute = np.array([p.relative_to is None for p in points])
    start_rows = absolute if absolute.any() else np.ones(len(points), bool)
    scaled = columns[:, active] / seconds[:, None]
    typical = 1 / np.array([np.median(column[column > 0]) for column in scaled.T])
    rates, _ = nnls(scaled[start_rows], np.ones(int(start_rows.sum())))
    rates = np.where(scaled[start_rows].any(axis=0), rates, 0.1 * typical)
    if known is not None:
        rates = np.where(known[active] > 0, known[active], rates)
    rates = np.clip(rates, 1e-6 * typical, 1e3 * typical)
    begin = np.concatenate([np.log(rates), np.zeros(len(groups))])
    if groups:
        full = np.zeros(len(TERMS))
        full[active] = rates
        off = np.log(seconds / step_seconds(columns, full, sharpness))
        begin[len(active) :] = [off[member[:, g] > 0].mean() for g in range(len(groups))]

    def unpack(x: Floats) -> Floats:
        full = np.zeros(len(TERMS))
        full[active] = np.exp(np.clip(x[: len(active)], -300, 300))  # times bytes, it must stay finite
        return full

    def residuals(x: Floats) -> Floats:
        predicted = np.log(step_seconds(columns, unpack(x), sharpness)) + member @ x[len(active) :]
        data = (predicted - np.log(seconds)) / _NOISE
        if known is None:
            return np.asarray(data)
        likely = [i for i, term in enumerate(active) if known[term] > 0]
        return np.concatenate([data, (x[likely] - np.log(known[[active[i] for i in likely]])) / _PRIOR])

    found = least_squares(residuals, begin, x_scale="jac" if known is None else 1.0, max_nfev=400)
    solved = unpack(found.x)
    solved[2] = 0.0 if (columns[:, 2] * solved[2] < 1e-9 * seconds).all() else solved[2]  # the solver only approaches 0
    share = [float(1 / rate) if rate > 0 else 0.0 for rate in solved[:2]]
    return Roofline(
        compute_share=share[0],
        memory_share=share[1],
        operation_s=float(solved[2]),
        exchange_bytes_per_s=float(1 / solved[3]) if solved[3] > 0 else math.inf,
        sharpness=sharpness,
        devices=tuple(dict.fromkeys(p.peaks.device for p in points)),
        factors={name: float(np.exp(x)) for name, x in zip(groups, found.x[len(active) :], strict=True)},
    )


def _terms(points: Sequence[RooflinePoint], near: Roofline | None) -> int:
    return 0 if near is not None else int(features([(p.load, p.peaks) for p in points]).any(axis=0).sum())


def _groups(points: Sequence[RooflinePoint]) -> list[str]:
    return sorted({p.relative_to for p in points if p.relative_to is not None})
