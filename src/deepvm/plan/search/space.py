"""Stage 3, architecture-level analysis: prices and scores of every cluster in, the best ones out.

The arrays are [architecture, worker row, node count]. The search is exhaustive, so the optimum is proven. Only the
best memory tier of a cluster enters (``tiers``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from deepvm.plan import architectures
from deepvm.plan.architectures import Architecture, Cluster
from deepvm.plan.request import Request
from deepvm.plan.search.board import Board, Floats, Ints
from deepvm.units import USD_DECIMALS, USD_TOLERANCE


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A cell of the space with one memory tier."""

    architecture: Architecture
    worker: int
    nodes: int
    cluster: Cluster
    performance: float
    score: float


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """The best cell at every price: scores rise strictly with the price."""

    hourly_usd: Floats
    cell: Ints

    def at(self, budget_usd: float) -> int | None:
        """Return the best cell within a budget."""
        index = int(np.searchsorted(self.hourly_usd, budget_usd + USD_TOLERANCE, side="right")) - 1
        return None if index < 0 else int(self.cell[index])


@dataclass(frozen=True, kw_only=True)
class Space:
    board: Board
    architectures: tuple[Architecture, ...]
    nodes: Ints
    hourly_usd: Floats  # [architecture, worker, nodes], inf if impossible
    performance: Floats  # [worker, nodes], eFLOPS × n × scaling
    score: Floats  # [architecture, worker, nodes], higher is better, -inf if impossible

    def indices(self, cell: int) -> tuple[int, int, int]:
        a, w, n = np.unravel_index(cell, self.hourly_usd.shape)
        return int(a), int(w), int(n)

    @cached_property
    def possible(self) -> Ints:
        """The possible cells, cheapest first; equal prices by score, then by fewer machines."""
        cells = np.flatnonzero(self.score.reshape(-1) > -np.inf)
        usd, score = self.hourly_usd.reshape(-1)[cells], self.score.reshape(-1)[cells]
        machines = cells % len(self.nodes)
        return np.asarray(cells[np.lexsort((machines, -score, usd))])

    def frontier(self) -> Frontier:
        cells = self.possible
        if not cells.size:
            return Frontier(hourly_usd=np.empty(0), cell=np.empty(0, dtype=np.int64))
        score = self.score.reshape(-1)[cells]
        before = np.concatenate(([-np.inf], np.maximum.accumulate(score)[:-1]))
        better = score > before
        return Frontier(hourly_usd=self.hourly_usd.reshape(-1)[cells[better]], cell=cells[better])

    def best(
        self, budget_usd: float, limit: int, *, keep: NDArray[np.bool_] | None = None, once: bool = False
    ) -> list[Candidate]:
        """Return the best clusters within the budget, best first; ties go to the cheaper, then to the smaller cluster.

        They differ in architecture, type or place; with ``once``, not in the place alone at the same price. By the
        paper's rules they may also differ in size and memory nodes: the ``limit`` best clusters are then in the
        ``limit`` best cells, since a cell's best is its cheapest."""
        score, usd = self.score.reshape(-1), self.hourly_usd.reshape(-1)
        admitted = (usd <= budget_usd + USD_TOLERANCE) & (score > -np.inf)
        if keep is not None:
            admitted &= np.broadcast_to(keep, self.score.shape).reshape(-1)
        cells = np.flatnonzero(admitted) if self.board.paper else self._best_sizes(admitted)
        if once and not self.board.paper:
            cells = self._one_of_each(cells)
        if cells.size > limit:
            threshold = np.partition(score[cells], cells.size - limit)[cells.size - limit]
            cells = cells[score[cells] >= threshold]
        order = np.lexsort((cells % len(self.nodes), usd[cells], -score[cells]))[:limit]
        each = limit if self.board.paper else 1
        found = [c for cell in cells[order] for c in self.expand(int(cell), budget_usd, each)]
        found.sort(key=lambda c: (-c.score, architectures.hourly_usd(c.cluster)))  # stable: cells keep their order
        return found[:limit]

    def _best_sizes(self, admitted: NDArray[np.bool_]) -> Ints:
        """Return the best admitted cell of each architecture and row of workers."""
        score = np.where(admitted.reshape(self.score.shape), self.score, -np.inf)
        most = score.max(axis=2, initial=-np.inf)
        usd = np.where((score == most[:, :, None]) & (score > -np.inf), self.hourly_usd, np.inf)
        first = usd.argmin(axis=2)  # the fewest machines among equal prices
        return np.asarray(np.flatnonzero(most > -np.inf) * len(self.nodes) + first[most > -np.inf])

    def _one_of_each(self, cells: Ints) -> Ints:
        """Keep the first of the cells that have architecture, type, size and price in common."""
        a, w, n = np.unravel_index(cells, self.hourly_usd.shape)
        usd = self.hourly_usd.reshape(-1)[cells]
        _, first = np.unique(np.stack([a, self.board.workers.instance[w], n, usd]), axis=1, return_index=True)
        return np.asarray(cells[np.sort(first)])

    def expand(self, cell: int, budget_usd: float, limit: int) -> list[Candidate]:
        """Return the clusters of a cell within the budget, cheapest first: one for each memory tier."""
        a, w, n = self.indices(cell)
        architecture, nodes = self.architectures[a], int(self.nodes[n])
        clusters = architecture.clusters(self.board, w, nodes, limit)
        within = [c for c in clusters if architectures.hourly_usd(c) <= budget_usd + USD_TOLERANCE]
        performance = float(self.performance[w, n])
        return [
            Candidate(
                architecture=architecture,
                worker=w,
                nodes=nodes,
                cluster=cluster,
                performance=performance,
                score=self._score_of(cluster, a, w, n),
            )
            for cluster in within
        ]

    def _score_of(self, cluster: Cluster, a: int, w: int, n: int) -> float:
        """Return the cell's score, which is its cheapest cluster's; scores that are prices fall with the markup."""
        score, request = float(self.score[a, w, n]), self.board.request
        waiting = request.usd_per_hour_of_waiting
        markup = (architectures.hourly_usd(cluster) + waiting) / (float(self.hourly_usd[a, w, n]) + waiting)
        by_price = request.objective == "cost" and request.policy in ("deepvm", "noscale")
        return score * markup if by_price and markup > 1 + 1e-9 else score


def node_counts(board: Board, request: Request) -> Ints:
    """Return 1 to the number of machines that the budget pays for if all are of the cheapest type."""
    usd = np.concatenate([board.workers.spot_usd, board.workers.on_demand_usd])
    cheapest = usd.min(initial=np.inf)
    if not np.isfinite(cheapest):
        return np.arange(1, 2)
    affordable = int(min((request.budget_usd + USD_TOLERANCE) / cheapest, request.max_nodes))
    return np.arange(1, max(affordable, 1) + 1)


def prices(board: Board, kinds: Sequence[Architecture], nodes: Ints) -> Floats:
    shape = (len(board.workers), len(nodes))
    if not kinds:
        return np.empty((0, *shape))
    usd = np.stack([np.asarray(kind.hourly_usd(board, nodes), dtype=np.float64) for kind in kinds])
    too_few = nodes < board.workers.least_nodes[:, None]  # the job does not fit into their GPUs together
    return np.where(np.isnan(usd) | too_few, np.inf, usd.round(USD_DECIMALS))
