"""The analytic screen: a space and its spot markets in; clusters with a conduct, the most promising first, out.

The expected time is work / (availability × efficiency), and the expected cost is that of the machines meanwhile. It
decides only what is replayed, never what is recommended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from deepvm.plan.risk.overheads import NODE_FAILURES_PER_H, rough_overheads
from deepvm.plan.risk.spot import Spot, TypeMarket
from deepvm.plan.risk.trial import (
    Choice,
    Trial,
    fallback_allowed,
    losses_per_h,
    speeds_of,
    tier_of,
)
from deepvm.plan.search.board import Floats, Ints
from deepvm.plan.search.space import Space
from deepvm.policy.conduct import Tier
from deepvm.units import USD_TOLERANCE

MOST_WORK_H = 10_000.0  # longer jobs are not replayed
_BIN = 0.08  # of the logarithm of the expected time: one cluster of each bin is enough
_SCREENED_TICKS = 4608  # of a market: 32 days
Flags = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Gangs:
    """How gangs of every size fare in some zones of a market; entry n - 1 is that of n machines."""

    up: Floats  # share of the time in which some zone has all of them
    losses_per_h: Floats
    speed: Floats  # of a gang that shrinks to half, on average over all time
    shrinks_per_h: Floats

    @classmethod
    def of(cls, market: TypeMarket, columns: Sequence[int]) -> Gangs:
        capacity = market.capacity[list(columns), :_SCREENED_TICKS]
        tick_h = market.tick_s / 3600
        figures = np.empty((4, market.machines))
        for n in range(1, market.machines + 1):
            up = capacity >= n
            figures[0, n - 1] = up.any(axis=0).mean()
            figures[1, n - 1] = _rate(up[:, :-1] & ~up[:, 1:], up[:, :-1], tick_h)
            some = np.minimum(capacity, n)
            enough = some >= (n + 1) // 2
            figures[2, n - 1] = np.where(enough, some, 0).max(axis=0).mean() / n
            figures[3, n - 1] = _rate(enough[:, :-1] & (some[:, 1:] < some[:, :-1]), enough[:, :-1], tick_h)
        return cls(up=figures[0], losses_per_h=figures[1], speed=figures[2], shrinks_per_h=figures[3])

    def share(self, nodes: Ints, *, shrink: bool) -> Floats:
        """Return the work done in an hour, over that of a gang that is never lost."""
        at = np.minimum(nodes, len(self.up)) - 1
        return np.asarray((self.speed if shrink else self.up)[at])

    def losses(self, nodes: Ints, *, shrink: bool) -> Floats:
        at = np.minimum(nodes, len(self.up)) - 1
        return np.asarray((self.shrinks_per_h if shrink else self.losses_per_h)[at])


def _rate(events: Flags, while_: Flags, tick_h: float) -> float:
    hours = float(while_.sum()) * tick_h
    return float(events.sum()) / hours if hours else 1.0


@dataclass(frozen=True, kw_only=True)
class Screened:
    """Clusters of one architecture, machine type, zone set and conduct, by number of machines."""

    architecture: int
    worker: int  # the row of its first zone
    market: TypeMarket | None
    columns: tuple[int, ...]
    shrink: bool
    tier: Tier
    nodes: Ints
    hours: Floats
    usd: Floats
    fallback: Flags


@dataclass(frozen=True, kw_only=True)
class Screen:
    """What is possible in a space, and its estimates."""

    space: Space
    spot: Spot

    @cached_property
    def possible(self) -> Flags:
        """[architecture, worker, nodes]: within the budget, and fast enough without preemption."""
        space, request = self.space, self.space.board.request
        assert request.work_eflops_h is not None  # noqa: S101 - the request checks it
        least = max(request.least_performance * (1 + 1e-9), request.work_eflops_h / MOST_WORK_H)
        fast = space.performance >= least
        within = space.hourly_usd <= request.budget_usd + USD_TOLERANCE
        return np.asarray((space.score > -np.inf) & within & fast)

    def value(self, rows: Screened) -> Floats:
        """Return what is least for the best cluster, by the objective."""
        request = self.space.board.request
        performance = self.space.performance[rows.worker, rows.nodes - 1]
        if request.objective == "throughput":
            return np.asarray(-performance)
        if request.objective == "time":
            return rows.hours
        return rows.usd + request.usd_per_hour_of_waiting * rows.hours

    def groups(self) -> Iterator[Screened]:
        """Estimate all clusters."""
        for a in range(len(self.space.architectures)):
            cells = np.argwhere(self.possible[a])
            if not len(cells):
                continue
            cluster = self.space.architectures[a].clusters(
                self.space.board, int(cells[0, 0]), int(self.space.nodes[cells[0, 1]]), 1
            )[0]
            tier = tier_of(cluster)
            on_spot = any(part.market.value == "spot" and part.count for part in cluster) or tier == "anchor"
            for instance in np.unique(self.space.board.workers.instance[cells[:, 0]]).tolist():
                yield from self._spot(a, instance, tier) if on_spot else self._on_demand(a, instance, tier)

    def _on_demand(self, a: int, instance: int, tier: Tier) -> Iterator[Screened]:
        """The cheapest row decides: nothing else differs."""
        space = self.space
        rows = np.flatnonzero(space.board.workers.instance == instance)
        row = int(rows[np.argmin(space.board.workers.on_demand_usd[rows])])
        nodes = space.nodes[self.possible[a, row]]
        if nodes.size:
            hours = self._work_h(row, nodes) + rough_overheads(space.board, tier, row).start_s / 3600
            yield Screened(
                architecture=a, worker=row, market=None, columns=(), shrink=False, tier=tier, nodes=nodes,
                hours=hours, usd=hours * space.hourly_usd[a, row, nodes - 1], fallback=np.zeros(len(nodes), bool),
            )  # fmt: skip

    def _spot(self, a: int, instance: int, tier: Tier) -> Iterator[Screened]:
        market = self.market(instance)
        if market is None:
            return
        rows = np.array([column.row for column in market.columns])
        can = self.possible[a][rows]  # [column, nodes]
        seen: set[tuple[bytes, tuple[int, ...]]] = set()
        for zones in market.zone_sets:
            patterns, which = np.unique(can[list(zones)], axis=1, return_inverse=True)
            for p in range(patterns.shape[1]):
                columns = tuple(zone for zone, allowed in zip(zones, patterns[:, p], strict=True) if allowed)
                nodes = self.space.nodes[which.ravel() == p]
                key = (nodes.tobytes(), columns)
                if not columns or key in seen:
                    continue
                seen.add(key)
                for shrink in (False, True):
                    several = nodes[nodes > 1] if shrink else nodes
                    if several.size:
                        yield self._estimate(a, market, columns, several, shrink, tier)

    def _estimate(
        self, a: int, market: TypeMarket, columns: tuple[int, ...], nodes: Ints, shrink: bool, tier: Tier
    ) -> Screened:
        space, board = self.space, self.space.board
        row = market.columns[columns[0]].row
        over = rough_overheads(board, tier, row)
        gangs = self._gangs(market, columns)
        spots = nodes - (1 if tier == "anchor" else 0)
        share, losses = gangs.share(spots, shrink=shrink), gangs.losses(spots, shrink=shrink)
        interval = np.array([over.interval_s(float(rate)) for rate in losses])
        slower = 1 + np.array([over.lost_share(i, float(rate)) for i, rate in zip(interval, losses, strict=True)])
        work_h = self._work_h(row, nodes) * slower
        start_h = over.start_s / 3600
        hours = start_h + work_h / np.maximum(share, 1e-9)
        spot_usd = spots * board.workers.spot_usd[row]
        keeper_usd = space.hourly_usd[a, row, nodes - 1] - spot_usd
        fallback = np.zeros(len(nodes), bool)
        hired_h = np.zeros(len(nodes))
        due_s = board.request.deadline_s
        if due_s is not None:
            due_h = due_s / 3600
            fallback = fallback_allowed(space, row, keeper_usd, nodes).astype(bool)
            late = fallback & (hours > due_h) & (share < 1)
            rest_h = (work_h - share * (due_h - start_h)) / np.maximum(1 - share, 1e-9)
            hired_h = np.where(late, np.clip(rest_h, 0.0, due_h), 0.0)
            hours = np.where(late, due_h, hours)
        usd = (hours - hired_h) * share * spot_usd + hours * keeper_usd
        hired = hired_h > 0
        usd[hired] += hired_h[hired] * spots[hired] * board.workers.on_demand_usd[row]
        return Screened(
            architecture=a, worker=row, market=market, columns=columns, shrink=shrink, tier=tier, nodes=nodes,
            hours=hours, usd=usd, fallback=fallback,
        )  # fmt: skip

    def _work_h(self, row: int, nodes: Ints) -> Floats:
        work = self.space.board.request.work_eflops_h
        assert work is not None  # noqa: S101 - the request checks it
        return np.asarray(work / self.space.performance[row, nodes - 1])

    @cached_property
    def _known(self) -> dict[object, object]:
        return {}

    def market(self, instance: int) -> TypeMarket | None:
        if ("market", instance) not in self._known:
            self._known["market", instance] = self.spot.of_type(instance)
        return self._known["market", instance]  # type: ignore[return-value]

    def _gangs(self, market: TypeMarket, columns: tuple[int, ...]) -> Gangs:
        chosen = market.capacity[list(columns), :_SCREENED_TICKS]
        key = ("gangs", chosen.shape, hash(chosen.tobytes()))
        if key not in self._known:
            self._known[key] = Gangs.of(market, columns)
        return self._known[key]  # type: ignore[return-value]


@dataclass(frozen=True, kw_only=True, order=True)
class Pick:
    """One cluster of a group; the least value is the most promising."""

    value: float
    usd: float
    number: int  # of its group
    nodes: int
    at: int


def picks(screen: Screen, groups: Sequence[Screened]) -> list[Pick]:
    """Return the best cluster of each group and bin of expected time, the most promising first."""
    due_s = screen.space.board.request.deadline_s
    due_h = np.inf if due_s is None else due_s / 3600
    found = []
    for number, rows in enumerate(groups):
        value = screen.value(rows)
        bins = np.floor(np.log(np.maximum(rows.hours, 1e-6)) / _BIN)
        order = np.lexsort((rows.usd, value, bins))
        first = np.concatenate([[True], bins[order][1:] != bins[order][:-1]])
        for at in order[first].tolist():
            late = max(0.0, float(rows.hours[at]) / due_h - 1)  # by the estimate, which may be wrong
            penalty = abs(float(value[at])) * 4 * late
            found.append(
                Pick(
                    value=float(value[at]) + penalty, usd=float(rows.usd[at]), number=number,
                    nodes=int(rows.nodes[at]), at=at,
                )
            )  # fmt: skip
    return sorted(found)


def trial_of(screen: Screen, rows: Screened, nodes: int, *, fallback: bool) -> Trial | None:
    """Make the trial of one cluster; None if its cheapest machines are over the budget after all."""
    return trial_of_choice(
        screen, rows.architecture, rows.worker, rows.market, rows.columns, nodes, shrink=rows.shrink, tier=rows.tier,
        fallback=fallback,
    )  # fmt: skip


def trial_of_choice(
    screen: Screen, architecture: int, worker: int, market: TypeMarket | None, columns: tuple[int, ...], nodes: int, *,
    shrink: bool, tier: Tier, fallback: bool,
) -> Trial | None:  # fmt: skip
    """Make the trial of these machines in these zones, as ``trial_of`` does."""
    space = screen.space
    cell = int(np.ravel_multi_index((architecture, worker, nodes - 1), space.hourly_usd.shape))
    found = space.expand(cell, space.board.request.budget_usd, 1)
    if not found:
        return None
    least = max((nodes + 1) // 2, int(space.board.workers.least_nodes[worker])) if shrink else None
    spots = nodes - (1 if tier == "anchor" else 0)
    rate = nodes * NODE_FAILURES_PER_H
    if market is not None:
        anchors = nodes - spots
        rate = losses_per_h(market, spots, columns, None if least is None else max(1, least - anchors))
    return Trial(
        board=space.board,
        candidate=found[0],
        choice=Choice(columns=columns, least=least, replicas=1 if tier == "memory" else 0, fallback=fallback),
        market=market,
        tier=tier,
        speeds=speeds_of(space, worker, nodes),
        losses_per_h=rate,
    )
