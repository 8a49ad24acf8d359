"""Memory tiers of clusters: a board and workers in, the memory nodes that serve them and their price out.

By the paper's rules a tier is the cheapest machines that hold and receive the checkpoints. Otherwise it has the least
total of four costs an hour: its rent; its traffic to another zone; a sum for each further node, since somebody must
care for it; and the price of the workers while they wait for a restore. Only rent and traffic count towards the budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepvm.catalog.clouds.traffic import between_zones_usd_per_gb
from deepvm.performance import bandwidth_memory_nodes, table_memory_nodes
from deepvm.performance.restore import CHECKSUM_BYTES_PER_S, CONNECTIONS, FLOW_BYTES_PER_S
from deepvm.plan.search.board import USABLE_MEMORY, Board, Floats, Ints, usable_gib

MOST_NODES = 8  # of a tier, unless the checkpoints need more
NODE_USD = 0.02  # an hour, of each further node: two hours a year of somebody's time
FAILURES_PER_YEAR = 0.05  # of one on-demand machine
COST_DECIMALS = 9  # smaller differences come from float addition and must not decide
_GBIT = 1e9 / 8
_EACH = (slice(None), None)  # every option, as rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Tier:
    """Memory nodes of one type in one place: a row of ``board.memory``, their number, and their traffic's price."""

    row: int
    count: int
    traffic_usd: float  # an hour


def failure_per_day(nodes: int) -> float:
    """Return the chance that one of these machines fails in a day, and takes its share of a checkpoint with it."""
    return float(1 - (1 - FAILURES_PER_YEAR / 365) ** nodes)


def cheapest_usd(board: Board, nodes: Ints) -> Floats:
    """Return [row of workers, node count]: the price of the tier that each cluster of spot workers has; inf for none.

    Clusters whose workers alone exceed the budget or the market have none."""
    if board.paper:
        return _PaperTiers(board).cheapest_usd(nodes)
    workers = board.workers
    result = np.full((len(workers), len(nodes)), np.inf)
    for place in np.unique(workers.place):
        rows = np.flatnonzero(workers.place == place)
        rent = nodes * workers.spot_usd[rows][:, None]
        possible = (rent <= board.request.budget_usd) & (nodes <= workers.spot_limit[rows][:, None])
        if possible.any():
            options = _Options(board, int(place), int(workers.site[rows[0]]))
            result[rows] = options.cheapest(rent, workers.gbps[rows][:, None], nodes, possible)
    return result


def for_rent(board: Board, rows: Ints, nodes: Ints, rent_usd: float) -> Floats:
    """Return [node count]: the price of the tier at the place of these workers, if together they cost ``rent_usd``."""
    if board.paper:
        return np.asarray(_PaperTiers(board).cheapest_usd(nodes)[rows[0]])
    options = _Options(board, int(board.workers.place[rows[0]]), int(board.workers.site[rows[0]]))
    gbps = np.full(1, board.workers.gbps[rows].min())
    rent = np.full((1, len(nodes)), rent_usd)
    return np.asarray(options.cheapest(rent, gbps[:, None], nodes, np.ones_like(rent, dtype=bool))[0])


def tiers(board: Board, worker: int, nodes: int, limit: int, rent_usd: float | None = None) -> list[Tier]:
    """List tiers for one cluster, the best first, at most ``limit``. ``rent_usd`` replaces the workers' price."""
    if board.paper:
        return [
            Tier(row=row, count=count, traffic_usd=0.0) for row, count in _PaperTiers(board).list(worker, nodes, limit)
        ]
    workers = board.workers
    options = _Options(board, int(workers.place[worker]), int(workers.site[worker]))
    rent = nodes * float(workers.spot_usd[worker]) if rent_usd is None else rent_usd
    return options.ranked(rent, float(workers.gbps[worker]), nodes)[:limit]


class _Options:
    """All tiers that can serve workers of a place, cheapest rent first."""

    def __init__(self, board: Board, place: int, site: int) -> None:
        self._board = board
        request, memory = board.request, board.memory
        rows = np.flatnonzero(memory.site == site)
        wanted = np.ceil(board.checkpoints_gib / usable_gib(memory.memory_gib[rows]))
        serve = bandwidth_memory_nodes(request.checkpoint_bytes, request.checkpoint_every_s, memory.gbps[rows])
        least = np.maximum(wanted, serve)
        limit = np.minimum(memory.limit[rows], request.max_nodes)
        elsewhere = between_zones_usd_per_gb(board.catalog.cloud_at(place))
        usd_per_gb = np.where(memory.place[rows] == place, 0.0, elsewhere)
        kept = self._undominated(memory.usd[rows], memory.gbps[rows], least, limit, usd_per_gb)
        options = [
            (int(rows[i]), m)
            for i in kept
            for m in range(int(least[i]), int(min(limit[i], max(least[i], MOST_NODES))) + 1)
        ]
        self.row = np.array([row for row, _ in options], dtype=np.int64)
        self.count = np.array([m for _, m in options], dtype=np.int64)
        per_gb = dict(zip(rows.tolist(), usd_per_gb.tolist(), strict=True))
        self.usd_per_gb = np.array([per_gb[row] for row, _ in options])
        self.rent = self.count * memory.usd[self.row]
        order = np.lexsort((self.row, self.count, self.rent))
        for name in ("row", "count", "usd_per_gb", "rent"):
            setattr(self, name, getattr(self, name)[order])
        self.node_bytes_per_s = self.count * memory.gbps[self.row] * _GBIT

    @staticmethod
    def _undominated(usd: Floats, gbps: Floats, least: Floats, limit: Floats, usd_per_gb: Floats) -> list[int]:
        """Leave out types that another beats in price, bandwidth, traffic and number of nodes."""
        order = np.flatnonzero(np.isfinite(usd) & (least <= limit))
        if not order.size:
            return []
        order = order[np.lexsort((order, -gbps[order], usd[order]))]
        # Most types are as good as the best in all but bandwidth: a faster and cheaper one of these beats the rest.
        good = (least == least[order].min()) & (limit == limit[order].max()) & (usd_per_gb == usd_per_gb[order].min())
        fastest = np.maximum.accumulate(np.where(good[order], gbps[order], -np.inf))
        most = np.maximum(least, MOST_NODES)
        beaten = (gbps[order] <= np.concatenate(([-np.inf], fastest[:-1]))) & (most[order] == most[order].min())
        order = order[~beaten]
        gbps, least, limit, usd_per_gb, most = (each[order] for each in (gbps, least, limit, usd_per_gb, most))
        worse = np.arange(len(order))[:, None] < np.arange(len(order))  # [one, another that is not cheaper]
        for better in (
            gbps[:, None] >= gbps,
            least[:, None] <= least,
            most[:, None] == most,
            limit[:, None] >= limit,
            usd_per_gb[:, None] <= usd_per_gb,
        ):
            worse &= better
        return [int(i) for i in order[~worse.any(axis=0)]]

    def _traffic_usd(self, nodes: Ints, options: Any = _EACH) -> Floats:
        """Return [option, cluster]: every save goes to the nodes once, every restore to each worker."""
        request = self._board.request
        times = 3600 / request.checkpoint_every_s + request.losses_per_h * nodes
        return np.asarray(self.usd_per_gb[options] * (request.checkpoint_bytes / 1e9 * times))

    def _cost_usd(self, rent: Floats, gbps: Floats, nodes: Ints) -> Floats:
        """Return [option, cluster]: the total that decides, of rent, traffic, care and workers that wait for a restore.

        Clusters have a rent of their workers, the bandwidth of one, and a number."""
        request, size = self._board.request, self._board.request.checkpoint_bytes
        flows = self.count * CONNECTIONS * FLOW_BYTES_PER_S
        rate = np.minimum(np.minimum(gbps * _GBIT, CHECKSUM_BYTES_PER_S), flows[:, None])
        rate = np.minimum(rate, self.node_bytes_per_s[:, None] / nodes)
        waiting = rent * (request.losses_per_h * size / 3600) / rate
        cost = waiting + (self.rent + NODE_USD * (self.count - 1))[:, None]
        if self.usd_per_gb.any():
            cost += self._traffic_usd(nodes)
        return np.asarray(np.round(cost, COST_DECIMALS))

    def cheapest(self, rent: Floats, gbps: Floats, nodes: Ints, possible: NDArray[np.bool_]) -> Floats:
        """Return [row, node count]: rent and traffic of the tier with the least total; inf where there is none."""
        paid = np.full(rent.shape, np.inf)
        if len(self.row):
            count = np.broadcast_to(nodes, rent.shape)[possible]
            cost = self._cost_usd(rent[possible], np.broadcast_to(gbps, rent.shape)[possible], count)
            best = cost.argmin(axis=0)
            paid[possible] = self.rent[best] + self._traffic_usd(count, best)
        return paid

    def ranked(self, rent: float, gbps: float, nodes: int) -> list[Tier]:
        one = np.array([nodes])
        cost, traffic = self._cost_usd(np.array([rent]), np.array([gbps]), one)[:, 0], self._traffic_usd(one)[:, 0]
        return [
            Tier(row=int(self.row[i]), count=int(self.count[i]), traffic_usd=float(traffic[i]))
            for i in np.argsort(cost, kind="stable")
        ]


class _PaperTiers:
    """The cheapest machines that hold and receive the checkpoints, as the paper chose them."""

    def __init__(self, board: Board) -> None:
        self._board, self._memory = board, board.memory

    def _counts(self, rows: Ints, worker_gbps: float, nodes: Ints) -> Floats:
        """Return [rows of memory, node count]: the fewest memory nodes that serve these workers."""
        board, memory = self._board, self._memory
        if board.saturation == "table":
            serve = table_memory_nodes(nodes, np.minimum(memory.gbps[rows], worker_gbps)[:, None])
        else:
            request = board.request
            serve = bandwidth_memory_nodes(request.checkpoint_bytes, request.checkpoint_every_s, memory.gbps[rows])
            serve = serve[:, None]
        return np.broadcast_to(np.maximum(serve, self._for_bytes(rows)[:, None]), (len(rows), len(nodes)))

    def _for_bytes(self, rows: Ints) -> Floats:
        wanted_gib, memory_gib = self._board.checkpoints_gib, self._memory.memory_gib[rows]
        if self._board.request.published:  # every node holds all of it, in all its memory
            return np.where(memory_gib >= wanted_gib, 1.0, np.inf)
        return np.asarray(np.ceil(wanted_gib / (memory_gib * USABLE_MEMORY)))

    def _usd(self, rows: Ints, worker_gbps: float, nodes: Ints) -> Floats:
        """Return [rows of memory, node count]: the price of that tier, inf if a quota or the node limit forbids it."""
        counts = self._counts(rows, worker_gbps, nodes)
        most = np.minimum(self._memory.limit[rows], self._board.request.max_nodes)
        return np.asarray(np.where(counts <= most[:, None], counts, np.inf) * self._memory.usd[rows][:, None])

    def cheapest_usd(self, nodes: Ints) -> Floats:
        """Return [row of workers, node count]: the price of the cheapest memory tier at each worker row's site."""
        workers = self._board.workers
        result = np.full((len(workers), len(nodes)), np.inf)
        by_gbps = self._board.saturation == "table"
        if not by_gbps:  # the bandwidth model counts bytes, not workers: one node count serves for all
            nodes = nodes[:1]
        keys = np.stack([workers.site, workers.gbps if by_gbps else np.zeros(len(workers))], axis=1)
        for site, gbps in np.unique(keys, axis=0):
            rows = np.flatnonzero(self._memory.site == site)
            if rows.size:
                result[(keys[:, 0] == site) & (keys[:, 1] == gbps)] = self._usd(rows, gbps, nodes).min(axis=0)
        return result

    def list(self, worker: int, nodes: int, limit: int) -> list[tuple[int, int]]:
        """List the cheapest memory tiers for one cluster: (row of memory, count), cheapest first."""
        workers, count = self._board.workers, np.array([nodes])
        rows = np.flatnonzero(self._memory.site == workers.site[worker])
        gbps = float(workers.gbps[worker])
        usd = self._usd(rows, gbps, count)[:, 0]
        counts = self._counts(rows, gbps, count)[:, 0]
        order = np.lexsort((rows, counts, usd))[:limit]
        return [(int(rows[i]), int(counts[i])) for i in order if np.isfinite(usd[i])]
