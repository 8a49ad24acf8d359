"""Objectives and policies: a board in, the space of its clusters with a score for each out. All searches use it.

Every policy is a score over the same space, so that all are searched, swept and explained alike.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from deepvm.plan import architectures
from deepvm.plan.architectures import Architecture, SingleAnchor
from deepvm.plan.search.board import Board, Floats, Ints
from deepvm.plan.search.space import Space, node_counts, prices

Values = Callable[[Board, Floats, Floats], Floats]


def _throughput(_board: Board, performance: Floats, _usd: Floats) -> Floats:
    return performance


def _flopp(board: Board, performance: Floats, _usd: Floats) -> Floats:
    """Compute the paper's Z as it was run: spot FLOPP × n × ScalingFactor, for every architecture alike. A type without
    a spot price has no value, and is never chosen."""
    spot_usd = board.workers.spot_usd[:, None]
    return np.where(np.isfinite(spot_usd), performance / spot_usd, np.nan)


def _time_h(board: Board, performance: Floats, _usd: Floats) -> Floats:
    assert board.request.work_eflops_h is not None  # noqa: S101 - the request checks it
    return np.asarray(board.request.work_eflops_h / performance)


def _cost_usd(board: Board, performance: Floats, usd: Floats) -> Floats:
    return np.asarray((usd + board.request.usd_per_hour_of_waiting) * _time_h(board, performance, usd))


# name -> (value of [worker, nodes] performances and prices, +1 if more is better, unit)
_OBJECTIVES: dict[str, tuple[Values, int, str]] = {
    "throughput": (_throughput, +1, "eFLOPS"),
    "flopp": (_flopp, +1, "eFLOPS per USD/h"),
    "cost": (_cost_usd, -1, "USD"),
    "time": (_time_h, -1, "hours"),
}


def unit(objective: str) -> str:
    return _OBJECTIVES[objective][2]


def value(objective: str, board: Board, worker: int, performance: float, hourly_usd: float) -> float:
    """Return the objective's value of one cluster."""
    values, _, _ = _OBJECTIVES[objective]
    full = np.full((len(board.workers), 1), performance)
    return float(values(board, full, np.full_like(full, hourly_usd))[worker, 0])


def allowed_architectures(board: Board) -> tuple[Architecture, ...]:
    if board.request.policy in ("cost-first", "performance-first"):
        return (SingleAnchor(),)
    return tuple(architectures.find(name) for name in dict.fromkeys(board.request.architectures_of(board.catalog)))


def build_space(board: Board) -> Space:
    """Make all clusters of the board, with prices, performances and scores under the request's policy."""
    request = board.request
    nodes = node_counts(board, request)
    kinds = allowed_architectures(board)
    usd = prices(board, kinds, nodes)
    performance = board.workers.eflops[:, None] * nodes * board.scaling(nodes)
    score = _rounded(_scores(board, nodes, performance, usd))
    unfit = (performance < request.least_performance) | np.isnan(performance)  # NaN: more GPUs than samples
    score[~np.isfinite(usd) | unfit | np.isnan(score)] = -np.inf
    return Space(board=board, architectures=kinds, nodes=nodes, hourly_usd=usd, performance=performance, score=score)


def _rounded(score: Floats) -> Floats:
    """Round to 40 binary digits: smaller differences come from float addition and must not decide."""
    mantissa, exponent = np.frexp(score)
    return np.ldexp(np.rint(mantissa * 2.0**40) / 2.0**40, exponent)


def _scores(board: Board, nodes: Ints, performance: Floats, usd: Floats) -> Floats:
    policy, workers = board.request.policy, board.workers
    if policy == "cost-first":  # the type that gives the most machines
        return np.array(np.broadcast_to(nodes, usd.shape), dtype=np.float64)
    if policy == "performance-first":  # the fastest type of which two fit, then as many as fit
        _, rank = np.unique(workers.eflops, return_inverse=True)
        rank = rank.reshape(-1, 1) * (nodes.max(initial=0) + 1) + nodes
        return np.array(np.broadcast_to(rank, usd.shape), dtype=np.float64)
    if policy == "noscale":
        performance = workers.eflops[:, None] * nodes
    values, sign, _ = _OBJECTIVES[board.request.objective]
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.stack([sign * values(board, performance, usd[a]) for a in range(len(usd))])
