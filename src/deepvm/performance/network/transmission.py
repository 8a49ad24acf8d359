"""How long checkpoints take to the memory nodes: workers, nodes, bytes and links in, seconds and saturation out.

All workers send at once. A memory node with more workers than itself shares its link among them, and a saturated link
carries less than its rate: time = latency + bytes × load / usable bandwidth × load ^ penalty, where the load is workers
over memory nodes, at least 1. Machines that share one host also share its rate. ``deepvm calibrate network`` measures
the points; ``deepvm reproduce`` fits the paper's curve.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from deepvm.errors import UsageError
from deepvm.json_fields import json_fields
from deepvm.performance.checks import Floats, check_number
from deepvm.performance.profile import NetworkPoint

BYTES_PER_GBIT = 1e9 / 8
GROWTH = 1.25  # times the time of an unsaturated node: below, differences are noise
# DeepVM's published measurement: seconds to send one checkpoint, by number of memory nodes from one on.
PAPER_TRANSMISSION_S = (24.22, 4.89, 2.48, 1.72, 1.39, 1.29, 1.20)
FASTEST_HOST = 1e13  # bytes a second: beyond this, a host limits nothing


# --- one line: seconds by the number of memory nodes ----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class TransmissionCurve:
    """The same workers and bytes on 1, 2, 3 ... memory nodes: latency + one_node_s × max(1/m, 1/knee)^(1 + penalty)."""

    latency_s: float
    one_node_s: float
    penalty: float = 0.0  # 0: two nodes take half the time of one; above, less than half
    knee: float = math.inf  # the nodes from which another one does not help

    def seconds(self, nodes: ArrayLike) -> Floats:
        count = np.asarray(nodes, dtype=np.float64)
        if count.size and not count.min() >= 1:
            raise UsageError("a transmission time needs one memory node or more")
        return np.asarray(self.latency_s + self.one_node_s * np.minimum(count, self.knee) ** -(1.0 + self.penalty))

    def flat_from(self, most: int = 1000) -> int:
        """Return the fewest nodes of which one more saves less than a tenth of the time."""
        times = self.seconds(np.arange(1, most + 2))
        flat = np.flatnonzero(times[1:] > 0.9 * times[:-1])
        return int(flat[0]) + 1 if flat.size else most

    def to_json(self) -> dict[str, Any]:
        knee = None if self.knee == math.inf else self.knee
        return {**json_fields(self, "latency_s one_node_s penalty"), "knee": knee}


@dataclass(frozen=True, kw_only=True, slots=True)
class CurveFit:
    curve: TransmissionCurve
    mean_relative_error: float
    worst_relative_error: float


def fit_transmission_curve(nodes: Sequence[int], seconds: Sequence[float]) -> CurveFit:
    """Fit a curve by least squares of relative errors. Penalty and knee are added only if they improve it enough."""
    if len(nodes) != len(seconds) or len(set(nodes)) < 2:
        raise UsageError(
            f"a transmission curve needs the times of at least two node counts: found {len(nodes)} counts and "
            f"{len(seconds)} times"
        )
    for count, time_s in zip(nodes, seconds, strict=True):
        check_number("a node count", count, at_least=1)
        check_number("a time in seconds", time_s, above=0)
    n, t = np.asarray(nodes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    low, high = float(t.min()), float(t.max())
    top = float(n.max())

    def candidate(penalised: bool, kneed: bool) -> tuple[float, TransmissionCurve]:
        def curve(x: Floats) -> TransmissionCurve:
            rest = [float(value) for value in x[2:]]
            penalty = rest.pop(0) if penalised else 0.0
            knee = rest.pop(0) if kneed else math.inf
            return TransmissionCurve(
                latency_s=float(x[0]), one_node_s=math.exp(float(x[1])), penalty=penalty, knee=knee
            )

        extra = [(0.0, 5.0, 0.5)] * penalised + [(1.0, top, (1 + top) / 2)] * kneed
        best, loss = _least_squares(
            lambda x: np.log(curve(x).seconds(n) / t),
            starts=[
                (share * low, math.log(high), *(start + shift * (end - start) / 3 for _, end, start in extra))
                for share in (0.05, 0.8)
                for shift in (0.0, 1.0)
            ],
            low=(0.0, math.log(high) - 7, *(least for least, _, _ in extra)),
            high=(low, math.log(high) + 7, *(most for _, most, _ in extra)),
        )
        return _akaike(loss, len(best), len(n)), curve(best)

    shapes = [(penalised, kneed) for penalised in (False, True) for kneed in (False, True)]
    few = [shape for shape in shapes if 2 + sum(shape) < len(n) - 1] or [(False, False)]
    _, found = min((candidate(*shape) for shape in few), key=lambda pair: pair[0])
    errors = np.abs(found.seconds(n) / t - 1.0)
    return CurveFit(curve=found, mean_relative_error=float(errors.mean()), worst_relative_error=float(errors.max()))


# --- all points of a calibration --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Transmission:
    """A fitted model of all points. Its parts name what a time is bound by."""

    latency_s: float
    usable_share: float  # of a link's rate
    penalty: float
    host_bytes_per_s: float  # of all machines together; inf where each has a host of its own

    def __post_init__(self) -> None:
        check_number("latency_s", self.latency_s, at_least=0)
        check_number("usable_share", self.usable_share, above=0, at_most=1)
        check_number("penalty", self.penalty, at_least=0)
        if self.host_bytes_per_s != math.inf:
            check_number("host_bytes_per_s", self.host_bytes_per_s, above=0)

    def parts_s(
        self, *, workers: int, memory_nodes: int, checkpoint_bytes: float, link_gbps: float | None
    ) -> dict[str, float]:
        """Return how long each limit alone would take, without the latency."""
        parts = {"this host": workers * checkpoint_bytes / self.host_bytes_per_s}
        if link_gbps is not None:
            alone_s = checkpoint_bytes / (self.usable_share * link_gbps * BYTES_PER_GBIT)
            load = workers / memory_nodes
            parts["worker links"] = alone_s
            parts["node links"] = alone_s * load * max(1.0, load) ** self.penalty
        return parts

    def seconds(self, *, workers: int, memory_nodes: int, checkpoint_bytes: float, link_gbps: float | None) -> float:
        """Return the time until all checkpoints are remote."""
        check_number("workers", workers, at_least=1)
        check_number("memory_nodes", memory_nodes, at_least=1)
        check_number("checkpoint_bytes", checkpoint_bytes, at_least=0)
        if link_gbps is not None:
            check_number("link_gbps", link_gbps, above=0)
        parts = self.parts_s(
            workers=workers, memory_nodes=memory_nodes, checkpoint_bytes=checkpoint_bytes, link_gbps=link_gbps
        )
        return self.latency_s + max(parts.values())

    def bound_by(self, point: NetworkPoint) -> str:
        """Return what limits a point's time."""
        parts = self.parts_s(**_what(point))
        return max(parts, key=parts.__getitem__)

    def predicted_s(self, point: NetworkPoint) -> float:
        return self.seconds(**_what(point))

    def to_json(self) -> dict[str, Any]:
        host = None if self.host_bytes_per_s == math.inf else self.host_bytes_per_s
        return {**json_fields(self, "latency_s usable_share penalty"), "host_bytes_per_s": host}


@dataclass(frozen=True, kw_only=True, slots=True)
class TransmissionFit:
    model: Transmission
    mean_relative_error: float
    worst_relative_error: float
    held_out_error: float | None  # mean, each point predicted from all others; None with too few points

    def to_json(self) -> dict[str, Any]:
        errors = json_fields(self, "mean_relative_error worst_relative_error held_out_error")
        return {**self.model.to_json(), **errors}


def fit_transmission(points: Sequence[NetworkPoint]) -> TransmissionFit:
    """Fit the model to the medians of the points, by least squares of relative errors."""
    model = _fit(points)
    errors = [_error(model, point) for point in points]
    held_out = None
    if len(points) >= 6:
        held_out = float(
            np.mean(
                [_error(_fit([*points[:i], *points[i + 1 :]], near=model), point) for i, point in enumerate(points)]
            )
        )
    return TransmissionFit(
        model=model,
        mean_relative_error=float(np.mean(errors)),
        worst_relative_error=max(errors),
        held_out_error=held_out,
    )


def _error(model: Transmission, point: NetworkPoint) -> float:
    return abs(model.predicted_s(point) / point.remote_s.median_s - 1.0)


def _fit(points: Sequence[NetworkPoint], *, near: Transmission | None = None) -> Transmission:
    """Fit the model; ``near`` is the result for almost the same points, and saves the search."""
    if len(points) < 2:
        raise UsageError(f"a transmission model needs at least two points: found {len(points)}")
    times = np.array([point.remote_s.median_s for point in points])
    if not times.min() > 0:
        raise UsageError("a transmission model needs times above zero")
    limited = any(point.link_gbps is not None for point in points)
    rate = float(max(p.workers * p.checkpoint_bytes / p.remote_s.median_s for p in points)) or 1.0

    def model(x: Floats) -> Transmission:
        return Transmission(
            latency_s=float(x[0]),
            host_bytes_per_s=math.exp(float(x[1])),
            usable_share=min(1.0, math.exp(float(x[2]))) if limited else 1.0,
            penalty=float(x[3]) if len(x) > 3 else 0.0,
        )

    load = np.array([point.workers / point.memory_nodes for point in points])
    total = np.array([float(point.workers * point.checkpoint_bytes) for point in points])
    alone_s = np.array(
        [0.0 if p.link_gbps is None else p.checkpoint_bytes / (p.link_gbps * BYTES_PER_GBIT) for p in points]
    )

    def residuals(x: Floats) -> Floats:  # as ``Transmission.seconds``, for all points at once
        fitted = model(x)
        link_s = alone_s / fitted.usable_share * np.maximum(1.0, load ** np.where(load > 1, 1 + fitted.penalty, 1.0))
        return np.asarray(np.log((fitted.latency_s + np.maximum(total / fitted.host_bytes_per_s, link_s)) / times))

    def search(width: int) -> tuple[Floats, float]:
        low = (0.0, math.log(rate) - 3, math.log(0.05), 0.0)[:width]
        high = (float(times.min()), math.log(FASTEST_HOST), 1e-9, 3.0)[:width]
        starts = [
            (share * float(times.min()), math.log(host * rate), math.log(0.9), 0.05)[:width]
            for share in (0.02, 0.5)
            for host in (1.05, 4.0)
        ]
        if near is not None:
            host = min(near.host_bytes_per_s, FASTEST_HOST)
            starts = [(near.latency_s, math.log(host), math.log(near.usable_share), near.penalty)[:width]]
        return _least_squares(residuals, starts=starts, low=low, high=high)

    best, loss = search((4 if near is not None and near.penalty else 3) if limited else 2)
    if limited and len(points) > 6 and near is None:
        penalised, penalised_loss = search(4)
        if _akaike(penalised_loss, 4, len(points)) < _akaike(loss, 3, len(points)):
            best = penalised
    found = model(best)
    binds = any(found.bound_by(point) == "this host" for point in points)
    return found if binds else replace(found, host_bytes_per_s=math.inf)


# --- saturation -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Saturation:
    """From how many workers a memory node the time to remote grows, at one link rate."""

    link_gbps: float | None
    flat_until: float | None  # workers a memory node without growth
    grows_from: float | None  # the next measured load; None if the time never grew
    host_bound: int  # points that this host slowed and not a link; they are left out

    def to_json(self) -> dict[str, Any]:
        return json_fields(self, "link_gbps flat_until grows_from host_bound")

    def __str__(self) -> str:
        link = "without a limit" if self.link_gbps is None else f"{self.link_gbps:g} Gbit/s"
        if self.flat_until is None and self.grows_from is None:
            return f"{link}: this host saturates before a memory node does"
        if self.flat_until is None:
            return f"{link}: saturated by {self.grows_from:.3g} workers a memory node, the least that this host shows"
        if self.grows_from is None:
            return f"{link}: not saturated by {self.flat_until:.3g} workers a memory node"
        return f"{link}: saturated from {self.grows_from:.3g} workers a memory node, flat until {self.flat_until:.3g}"


def saturation_points(points: Sequence[NetworkPoint], model: Transmission) -> tuple[Saturation, ...]:
    """Return one saturation for each link rate, in their order. Points that the host limits say nothing about links."""
    links = sorted({p.link_gbps for p in points}, key=lambda link: math.inf if link is None else link)
    return tuple(_saturation(link, [p for p in points if p.link_gbps == link], model) for link in links)


def _saturation(link: float | None, points: Sequence[NetworkPoint], model: Transmission) -> Saturation:
    told = [point for point in points if model.bound_by(point) != "this host"]
    hidden = len(points) - len(told)
    if not told:
        return Saturation(link_gbps=link, flat_until=None, grows_from=None, host_bound=hidden)
    by_load: dict[float, list[float]] = {}  # times over that of a worker with a memory node of its own
    for point in told:
        alone_s = model.predicted_s(replace(point, workers=1, memory_nodes=1))
        by_load.setdefault(point.workers / point.memory_nodes, []).append(point.remote_s.median_s / alone_s)
    loads = sorted(by_load)
    ratios = [float(np.median(by_load[load])) for load in loads]
    usual = ratios[0] if loads[0] <= 1 else 1.0
    grown = [load for load, ratio in zip(loads, ratios, strict=True) if ratio > GROWTH * usual]
    grows_from = grown[0] if grown else None
    flat = [load for load in loads if grows_from is None or load < grows_from]
    return Saturation(link_gbps=link, flat_until=max(flat, default=None), grows_from=grows_from, host_bound=hidden)


def _what(point: NetworkPoint) -> dict[str, Any]:
    return {
        "workers": point.workers,
        "memory_nodes": point.memory_nodes,
        "checkpoint_bytes": point.checkpoint_bytes,
        "link_gbps": point.link_gbps,
    }


def _akaike(loss: float, parameters: int, count: int) -> float:
    """Compute Akaike's criterion for small samples; of as many parameters as points, without its correction."""
    left = count - parameters - 1
    correction = 2 * parameters * (parameters + 1) / left if left > 0 else 0.0
    return count * math.log(max(loss, 1e-18) / count) + 2 * parameters + correction


def _least_squares(
    residuals: Callable[[Floats], Floats],
    *,
    starts: Sequence[tuple[float, ...]],
    low: tuple[float, ...],
    high: tuple[float, ...],
) -> tuple[Floats, float]:
    """Return the best result of several starts, and its sum of squares."""
    from scipy.optimize import least_squares  # slow to import, and only fits need it

    wide = tuple(max(top, bottom + 1e-12) for bottom, top in zip(low, high, strict=True))
    results = [
        least_squares(residuals, np.clip(start, low, wide), bounds=(low, wide), x_scale="jac") for start in starts
    ]
    best = min(results, key=lambda result: float(result.cost))
    return np.asarray(best.x, dtype=np.float64), 2.0 * float(best.cost)
