"""Clusters of several GPU types (``--mixed``): a board and the best cluster of one type in, a better mixed one out.

A cluster of N machines performs Σ eFLOPS × n × scaling(N): every machine gets a share of the batch by speed, and the
ring is as fast as its slowest link. With N, the place and the slowest admitted bandwidth fixed, this is an integer
program. A Lagrangian bound excludes most programs before they are solved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepvm.catalog import Market, Quota, binding_quotas
from deepvm.plan import architectures
from deepvm.plan.architectures import (
    AllOnDemand,
    AllSpot,
    Architecture,
    Cluster,
    Part,
    SingleAnchor,
    Tiering,
    memory_part,
)
from deepvm.plan.search import tiers
from deepvm.plan.search.board import Board, Floats, Ints
from deepvm.plan.search.space import Candidate, Space
from deepvm.units import USD_TOLERANCE

_MULTIPLIERS = 48  # points of the Lagrangian bound; more exclude no further programs
_GAP = 1e-9


@dataclass(frozen=True, kw_only=True)
class _Program:
    """One integer program: the number of machines, the rows of workers, and the money."""

    architecture: Architecture
    rows: Ints
    nodes: int
    gain: Floats  # of one machine of each row, at this size
    usd: Floats  # of one worker of each row
    limit: Floats  # most workers of each row
    anchor_usd: Floats | None  # inf if the row cannot anchor: no offer, too little memory, too slow a link
    fixed_usd: float  # the memory tier
    gbps: float
    bound: float


def search(board: Board, space: Space) -> list[Candidate]:
    """Find the best cluster of several types that meets the deadline and beats every cluster of one type."""
    incumbent = space.best(board.request.budget_usd, 1)
    in_time = board.request.least_performance
    # Just below the deadline's performance: reaching it exactly is in time.
    best_value = incumbent[0].score if incumbent else in_time * (1 - 4 * _GAP)
    best: Candidate | None = None
    programs = sorted(_programs(board, space, best_value), key=lambda p: -p.bound)
    for program in programs:
        if program.bound <= best_value * (1 + _GAP):
            break
        counts = _solve(board, program)
        if counts is None:
            continue
        value = float(program.gain @ counts.sum(axis=0))
        if value >= in_time and value > best_value * (1 + _GAP):
            best_value, best = value, _candidate(board, program, counts, value)
    return [] if best is None else [best]


def merge(single: Sequence[Candidate], several: Sequence[Candidate], limit: int) -> list[Candidate]:
    found = [*several, *single]
    found.sort(key=lambda c: (-c.score, architectures.hourly_usd(c.cluster)))
    return found[:limit]


def _programs(board: Board, space: Space, at_least: float) -> Iterator[_Program]:
    nodes, workers = space.nodes, board.workers
    # The anchor's own link receives the checkpoints, independent of the ring.
    anchor_usd = np.where(SingleAnchor().may_anchor(board), workers.on_demand_usd, np.inf)
    # A ring without EFA is for machines of which one at least has none; the others are better off with it.
    fastest_tcp = workers.gbps[~workers.efa].max(initial=0.0)
    rings = [(gbps, False) for gbps in np.unique(workers.gbps) if gbps <= fastest_tcp]
    rings += [(gbps, True) for gbps in np.unique(workers.gbps[workers.efa])]
    for gbps, efa in rings:
        slowed = _slowed(board, gbps, efa)
        gain = workers.eflops[:, None] * slowed.scaling(nodes)
        admitted = (workers.gbps >= gbps) & (workers.efa | (not efa))
        for place in np.unique(workers.place):
            rows = np.flatnonzero((workers.place == place) & admitted)
            for kind in space.architectures:
                yield from _programs_of(slowed, kind, rows, gain[rows], anchor_usd[rows], nodes, float(gbps), at_least)


def _slowed(board: Board, gbps: float, efa: bool) -> Board:
    """Return the board of a ring: no link is faster than its slowest, and without EFA in one machine none uses it."""
    workers = board.workers
    return replace(board, workers=replace(workers, gbps=np.minimum(workers.gbps, gbps), efa=workers.efa & bool(efa)))


def _programs_of(
    board: Board,
    kind: Architecture,
    rows: Ints,
    gain: Floats,
    anchor_usd: Floats,
    nodes: Ints,
    gbps: float,
    at_least: float,
) -> Iterator[_Program]:
    market = _worker_market(kind)
    if market is None or not rows.size:
        return
    workers = board.workers
    usd = (workers.spot_usd if market is Market.SPOT else workers.on_demand_usd)[rows]
    anchored = isinstance(kind, SingleAnchor)
    if not anchored:
        anchor_usd = usd
    useful = np.isfinite(usd) | np.isfinite(anchor_usd)
    least = _least_nodes(board)
    limit = (workers.spot_limit if market is Market.SPOT else workers.on_demand_limit)[rows]
    enough = limit >= nodes[-1]
    keep = useful & ~_dominated(usd, gain, anchor_usd, least[rows], enough, board)
    rows, usd, gain, anchor_usd, limit = rows[keep], usd[keep], gain[keep], anchor_usd[keep], limit[keep]
    if rows.size < 2 or not (np.isfinite(usd).any() and np.isfinite(anchor_usd).any()):
        return
    tiered = isinstance(kind, Tiering)  # a mix costs up to the budget, and its tier is chosen for that
    fixed = tiers.for_rent(board, rows, nodes, board.request.budget_usd) if tiered else np.zeros(len(nodes))
    least_nodes = 2 if anchored else 1
    possible = (
        np.isfinite(fixed)
        & (nodes >= least_nodes)
        & (nodes * gbps >= (0.0 if isinstance(kind, AllOnDemand) else board.checkpoint_gbps))
    )
    money = board.request.budget_usd + USD_TOLERANCE - np.where(possible, fixed, 0.0)
    bound = _bounds(gain, np.minimum(usd, anchor_usd), money, nodes)
    for n in np.flatnonzero(possible & (money > 0) & (bound > at_least * (1 + _GAP))):
        fits = least[rows] <= nodes[n]
        if not (fits & np.isfinite(usd)).any():
            continue
        yield _Program(
            architecture=kind,
            rows=rows,
            nodes=int(nodes[n]),
            gain=gain[:, n],
            usd=np.where(fits, usd, np.inf),
            limit=limit,
            anchor_usd=np.where(fits, anchor_usd, np.inf) if anchored else None,
            fixed_usd=float(fixed[n]),
            gbps=gbps,
            bound=float(bound[n]),
        )


def _worker_market(kind: Architecture) -> Market | None:
    if isinstance(kind, Tiering | SingleAnchor | AllSpot):
        return Market.SPOT
    return Market.ON_DEMAND if isinstance(kind, AllOnDemand) else None  # plug-ins have one type


def _least_nodes(board: Board) -> Floats:
    """Return [row of workers]: the machines that hold the job if each of them brought one GPU, as the others may."""
    instances = [board.catalog.instances[i] for i in board.workers.instance]
    job = board.request.job
    if job is None:
        return np.ones(len(instances))
    return np.array([job.least_gpus(i.accelerator_memory_gib) for i in instances])


def _dominated(
    usd: Floats, gain: Floats, anchor_usd: Floats, least: Floats, enough: NDArray[np.bool_], board: Board
) -> Any:
    """Return True for offers that another beats in price, in gain at every size, and in fitting the job, and of which
    there are ``enough`` for a whole cluster. With quotas, keep all."""
    dominated = np.zeros(len(usd), dtype=bool)
    if board.quotas:
        return dominated
    for i in range(len(usd)):
        cheaper = enough & (usd <= usd[i]) & (anchor_usd <= anchor_usd[i]) & (least <= least[i])
        better = cheaper & (gain >= gain[i]).all(axis=1) & ~dominated
        better[i] = False
        dominated[i] = better.any()
    return dominated


def _bounds(gain: Floats, usd: Floats, money: Floats, nodes: Ints) -> Floats:
    """Return [node count]: an upper bound of the gain of clusters of that size. For any price λ of a dollar,
    gain <= λ × money + N × max over types of (gain - λ × price)."""
    steepest = (gain / usd[:, None]).max()
    bound = np.full(len(nodes), np.inf)
    for multiplier in np.concatenate(([0.0], np.geomspace(steepest * 1e-4, steepest, _MULTIPLIERS))):
        relaxed = multiplier * money + nodes * (gain - multiplier * usd[:, None]).max(axis=0)
        bound = np.minimum(bound, relaxed)
    return np.where(money > 0, bound, -np.inf)


def _solve(board: Board, program: _Program) -> Ints | None:
    """Return [workers, anchors][row]: the count of each, or None if nothing fits."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    count = len(program.rows)
    anchored = program.anchor_usd is not None
    usd = np.concatenate([program.usd, program.anchor_usd]) if anchored else program.usd
    limit = np.concatenate([program.limit, np.ones(count)]) if anchored else program.limit
    most = np.where(np.isfinite(usd), np.minimum(limit, program.nodes), 0)
    usd = np.where(np.isfinite(usd), usd, 0.0)  # the upper bound of these is 0
    gain = np.tile(program.gain, 2) if anchored else program.gain
    constraints = [
        LinearConstraint(np.ones(len(usd)), program.nodes, program.nodes),
        LinearConstraint(usd, 0, board.request.budget_usd + USD_TOLERANCE - program.fixed_usd),
    ]
    if anchored:
        constraints.append(LinearConstraint(np.repeat([0.0, 1.0], count), 1, 1))
    markets = [_worker_market(program.architecture)] * count + [Market.ON_DEMAND] * (count if anchored else 0)
    for quota in board.quotas:
        vcpus = [_counted(board, quota, int(row)) for row in program.rows] * (2 if anchored else 1)
        weights = np.array([v if m is quota.market else 0.0 for v, m in zip(vcpus, markets, strict=True)])
        if weights.any():
            constraints.append(LinearConstraint(weights, 0, quota.vcpus))
    solved = milp(
        -gain,
        constraints=constraints,
        integrality=np.ones(len(usd)),
        bounds=Bounds(0, most),
        options={"time_limit": 5.0, "mip_rel_gap": 0.0},
    )
    if solved.x is None:
        return None
    chosen = np.array(np.rint(solved.x), dtype=np.int64)
    return chosen.reshape(2 if anchored else 1, count)


def _counted(board: Board, quota: Quota, row: int) -> float:
    instance = board.catalog.instances[board.workers.instance[row]]
    region, _ = board.catalog.places[board.workers.place[row]]
    counts = quota in binding_quotas(board.quotas, instance, quota.market, region)
    return instance.vcpus or 0.0 if counts else 0.0


def _candidate(board: Board, program: _Program, counts: Ints, value: float) -> Candidate:
    workers = board.workers
    parts: list[Part] = []
    for kind, row_counts in enumerate(counts):
        anchors = kind == 1
        market = Market.ON_DEMAND if anchors else (_worker_market(program.architecture) or Market.SPOT)
        usd = workers.spot_usd if market is Market.SPOT else workers.on_demand_usd
        parts += [
            Part.of_row("anchor" if anchors else "worker", workers, int(row), market, int(count), usd)
            for row, count in zip(program.rows, row_counts, strict=True)
            if count
        ]
    most = int(program.rows[int(counts.sum(axis=0).argmax())])
    cluster: Cluster = tuple(parts)
    if isinstance(program.architecture, Tiering):
        slowed = replace(board, workers=replace(workers, gbps=np.minimum(workers.gbps, program.gbps)))
        (tier,) = tiers.tiers(slowed, most, program.nodes, 1, rent_usd=board.request.budget_usd)
        cluster += (memory_part(board, tier),)
    return Candidate(
        architecture=program.architecture,
        worker=most,
        nodes=program.nodes,
        cluster=cluster,
        performance=value,
        score=value,
    )
