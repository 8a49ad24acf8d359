"""Stage 3's shapes of clusters: a board and node counts in, prices and clusters out. The search calls them.

A new one is a class with ``name``, ``summary``, ``hourly_usd`` and ``clusters``, named by an entry point of the group
``deepvm.architectures``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from deepvm.catalog import Market
from deepvm.errors import DeepvmError, UnknownName
from deepvm.plan.search import tiers
from deepvm.plan.search.board import ANCHOR_SHARE, Board, Floats, Ints, MemoryNodes, Workers
from deepvm.plan.search.tiers import Tier
from deepvm.units import USD_DECIMALS

RoleName = Literal["worker", "anchor", "memory"]
ENTRY_POINTS = "deepvm.architectures"


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Machines of one type, place and market in a cluster. ``instance`` and ``place`` index the catalogue."""

    role: RoleName
    instance: int
    place: int
    market: Market
    count: int
    usd_per_hour: float
    traffic_usd: float = 0.0  # an hour, of all of them: what clouds charge for bytes to another zone

    @classmethod
    def of_row(
        cls, role: RoleName, rows: Workers | MemoryNodes, row: int, market: Market, count: int, usd: Floats
    ) -> Part:
        """Make a part of one row of the board; ``usd`` is the column of its price."""
        return cls(
            role=role,
            instance=int(rows.instance[row]),
            place=int(rows.place[row]),
            market=market,
            count=count,
            usd_per_hour=float(usd[row]),
        )


Cluster = tuple[Part, ...]


def hourly_usd(cluster: Cluster) -> float:
    return round(sum(part.count * part.usd_per_hour + part.traffic_usd for part in cluster), USD_DECIMALS)


@runtime_checkable
class Architecture(Protocol):
    """The shape of a cluster. All of its training machines are of one type."""

    @property
    def name(self) -> str: ...

    @property
    def summary(self) -> str:
        """One line for people."""
        ...

    def hourly_usd(self, board: Board, nodes: Ints) -> Floats:
        """Return [row of board.workers, node count]: the price of the cheapest such cluster; inf if impossible.

        ``nodes`` counts the machines that train, in any role and market."""
        ...

    def clusters(self, board: Board, worker: int, nodes: int, limit: int) -> Sequence[Cluster]:
        """List the cheapest clusters of one worker row and size, cheapest first, at most ``limit``."""
        ...


def _up_to(limit: Floats, nodes: Ints, usd: Floats) -> Floats:
    return np.where(nodes <= limit[:, None], usd, np.inf)


class Tiering:
    """Spot workers, and on-demand CPU machines with their checkpoints in memory."""

    name = "tiering"
    summary = "spot workers + on-demand memory nodes"

    def hourly_usd(self, board: Board, nodes: Ints) -> Floats:
        workers = board.workers
        usd = nodes * workers.spot_usd[:, None] + tiers.cheapest_usd(board, nodes)
        # The workers' own links must carry the bytes, for any number of memory nodes.
        usd[nodes * workers.gbps[:, None] < board.checkpoint_gbps] = np.inf
        return _up_to(workers.spot_limit, nodes, usd)

    def clusters(self, board: Board, worker: int, nodes: int, limit: int) -> Sequence[Cluster]:
        workers = _workers(board, worker, nodes, Market.SPOT)
        return [(workers, memory_part(board, tier)) for tier in tiers.tiers(board, worker, nodes, limit)]


class SingleAnchor:
    """Spot workers and one on-demand machine of the same type, which trains too and keeps the checkpoints."""

    name = "single-anchor"
    summary = "spot workers + one on-demand anchor that trains too"

    def hourly_usd(self, board: Board, nodes: Ints) -> Floats:
        workers = board.workers
        # Without a spot offer, (n - 1) × inf is NaN at n = 1; such clusters are excluded below.
        with np.errstate(invalid="ignore"):
            usd = (nodes - 1) * workers.spot_usd[:, None] + workers.on_demand_usd[:, None]
        usd[:, nodes < 2] = np.inf
        usd[~self.may_anchor(board)] = np.inf
        usd[workers.on_demand_limit < 1] = np.inf
        anchors = 0 if board.request.published else 1  # the published bound counts the on-demand anchor as spot
        return _up_to(workers.spot_limit + anchors, nodes, usd)

    def may_anchor(self, board: Board) -> NDArray[np.bool_]:
        """Return [row of workers]: True if one machine holds the checkpoints and its link receives them in time.

        Unknown memory counts as enough. The published method bounds memory nodes only."""
        if board.request.published:
            return np.ones(len(board.workers), dtype=bool)
        share = 1.0 if board.paper else ANCHOR_SHARE
        with np.errstate(invalid="ignore"):
            too_small = board.workers.memory_gib * share < board.checkpoints_gib
        return ~too_small & (board.workers.gbps >= board.checkpoint_gbps)

    def clusters(self, board: Board, worker: int, nodes: int, limit: int) -> Sequence[Cluster]:  # noqa: ARG002
        workers = board.workers
        anchor = Part.of_row("anchor", workers, worker, Market.ON_DEMAND, 1, workers.on_demand_usd)
        return [(_workers(board, worker, nodes - 1, Market.SPOT), anchor)]


class AllSpot:
    """Spot workers only; checkpoints are in a durable store, whose price is not counted."""

    name = "all-spot"
    summary = "spot workers alone, checkpoints in a durable store (not in the price)"

    def hourly_usd(self, board: Board, nodes: Ints) -> Floats:
        usd = nodes * board.workers.spot_usd[:, None]
        usd[nodes * board.workers.gbps[:, None] < board.checkpoint_gbps] = np.inf
        return _up_to(board.workers.spot_limit, nodes, usd)

    def clusters(self, board: Board, worker: int, nodes: int, limit: int) -> Sequence[Cluster]:  # noqa: ARG002
        return [(_workers(board, worker, nodes, Market.SPOT),)]


class AllOnDemand:
    """On-demand workers only: the cost of the same work without spot machines."""

    name = "all-on-demand"
    summary = "on-demand workers alone, never preempted"

    def hourly_usd(self, board: Board, nodes: Ints) -> Floats:
        return _up_to(board.workers.on_demand_limit, nodes, nodes * board.workers.on_demand_usd[:, None])

    def clusters(self, board: Board, worker: int, nodes: int, limit: int) -> Sequence[Cluster]:  # noqa: ARG002
        return [(_workers(board, worker, nodes, Market.ON_DEMAND),)]


def _workers(board: Board, worker: int, count: int, market: Market) -> Part:
    usd = board.workers.spot_usd if market is Market.SPOT else board.workers.on_demand_usd
    return Part.of_row("worker", board.workers, worker, market, count, usd)


def memory_part(board: Board, tier: Tier) -> Part:
    part = Part.of_row("memory", board.memory, tier.row, Market.ON_DEMAND, tier.count, board.memory.usd)
    return replace(part, traffic_usd=tier.traffic_usd)


_BUILT_IN: dict[str, Architecture] = {kind.name: kind for kind in (Tiering(), SingleAnchor(), AllSpot(), AllOnDemand())}


def names() -> list[str]:
    return sorted(_BUILT_IN.keys() | {point.name for point in entry_points(group=ENTRY_POINTS)})


def find(name: str) -> Architecture:
    """Find a built-in architecture, or one of an installed package."""
    if name in _BUILT_IN:  # reading every installed package's entry points takes longer than planning
        return _BUILT_IN[name]
    point = next((p for p in entry_points(group=ENTRY_POINTS) if p.name == name), None)
    if point is None:
        raise UnknownName("architecture", name, names())
    try:
        architecture = point.load()()
    except Exception as error:
        raise DeepvmError(f"architecture {name!r} of {point.value} cannot be loaded: {error}") from error
    if not isinstance(architecture, Architecture):
        raise DeepvmError(f"{point.value} is not a valid architecture: it needs name, summary, hourly_usd and clusters")
    return architecture
