"""A cluster with a conduct, as the simulator takes it: a cell of the space and choices in; job and strategy out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepvm.catalog import Market as Side
from deepvm.catalog.clouds.notices import notice_s
from deepvm.market.hazard.hyperexponential import TYPICAL_UP, fit_spells
from deepvm.market.hazard.observed import observe, spells_of
from deepvm.plan.architectures import Cluster, Part, hourly_usd
from deepvm.plan.risk.overheads import overheads_of
from deepvm.plan.risk.spot import TypeMarket
from deepvm.plan.risk.strategy import Figures, strategy_of
from deepvm.plan.search.board import Board, Floats
from deepvm.plan.search.space import Candidate, Space
from deepvm.policy.conduct import LAST_MOMENT, Conduct, Tier
from deepvm.policy.fallback import SafetyNet
from deepvm.policy.placement import CheapestUp
from deepvm.policy.saving import YoungDalyByAge
from deepvm.simulate.by_age import policy_by_age
from deepvm.simulate.job import GangJob
from deepvm.simulate.strategy import LEAST_INTERVAL_S, Overheads, Strategy
from deepvm.units import USD_TOLERANCE

AT_NOTICE = " or at notice"  # replays count on it for the share of losses that a request says
NET = SafetyNet()  # keeps on-demand machines to the end


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What is decided beside the cluster. ``columns`` are of the type's market; none for on-demand clusters."""

    columns: tuple[int, ...]
    least: int | None  # machines that train, with which it continues; None waits for all
    replicas: int
    fallback: bool
    by_age: YoungDalyByAge | None = None  # instead of a fixed interval


@dataclass(frozen=True, kw_only=True, eq=False)
class Trial:
    """A candidate, a choice, and the market that it is replayed on."""

    board: Board
    candidate: Candidate
    choice: Choice
    market: TypeMarket | None  # None for on-demand clusters
    tier: Tier
    speeds: tuple[float, ...]  # by machines that train, from none to all, over that of all
    losses_per_h: float  # of the gang, while it trains

    @property
    def cluster(self) -> Cluster:
        return self.candidate.cluster

    @property
    def spot_machines(self) -> int:
        return sum(p.count for p in self.cluster if p.role != "memory" and p.market is Side.SPOT)

    @property
    def anchors(self) -> int:
        """On-demand machines that train beside spot ones."""
        return self.candidate.nodes - self.spot_machines if self.market is not None else 0

    @property
    def keeper_usd(self) -> float:
        """An hour of the machines that stay: memory nodes or an anchor."""
        stays = [p for p in self.cluster if p.role == "memory" or (self.anchors and p.market is Side.ON_DEMAND)]
        return hourly_usd(tuple(stays))

    @cached_property
    def overheads(self) -> Overheads:
        return overheads_of(self.board, self.candidate, self.tier, self.choice.replicas)

    @cached_property
    def interval_s(self) -> float:
        return self.overheads.interval_s(self.losses_per_h)

    @cached_property
    def job(self) -> GangJob:
        request = self.board.request
        assert request.work_eflops_h is not None  # noqa: S101 - the request checks it
        return GangJob(
            work_h=request.work_eflops_h / self.candidate.performance,
            machines=self.candidate.nodes,
            checkpoint_bytes=request.checkpoint_bytes,
            deadline_h=None if request.deadline_s is None else request.deadline_s / 3600,
            usd_per_hour_of_waiting=request.usd_per_hour_of_waiting,
        )

    @cached_property
    def figures(self) -> Figures:
        catalog = self.board.catalog
        worker = catalog.instances[int(self.board.workers.instance[self.candidate.worker])]
        return Figures(
            overheads=self.overheads,
            machines=self.candidate.nodes,
            spot_machines=0 if self.market is None else self.spot_machines,
            keeper_usd=self.keeper_usd,
            speeds=self.speeds,
            losses_per_h=self.losses_per_h,
            notice_s=notice_s(catalog.cloud_of(worker)),
            replicas=self.choice.replicas,
        )

    @cached_property
    def strategy(self) -> Strategy:
        name, zones = self.candidate.architecture.name, len(self.choice.columns)
        return strategy_of(
            self.conduct(), self.figures, name=name, zones=zones, notices=self.board.request.notices,
            most_usd=None if self.market is None else self.market.on_demand_usd,
        )  # fmt: skip

    @property
    def columns(self) -> tuple[int, ...]:
        return self.choice.columns

    def conduct(self) -> Conduct:
        board, request = self.board, self.board.request
        places = board.catalog.places
        if self.market is None:
            zones = [places[board.workers.place[self.candidate.worker]]]
        else:
            zones = [(c.region, c.zone) for c in (self.market.columns[i] for i in self.choice.columns)]
        several, moves = len(self.choice.columns) > 1, CheapestUp()
        least = self.candidate.nodes if self.choice.least is None else self.choice.least
        late = request.deadline_s is not None and self.choice.fallback
        save = f"every {self.interval_s:g}s" if self.choice.by_age is None else str(self.choice.by_age)
        return Conduct(
            zones=tuple(dict.fromkeys(zone or region for region, zone in zones)),
            way_back=moves.way_back if several else None,
            ceiling=moves.ceiling if several else None,
            at_loss="wait" if self.choice.least is None else "shrink",
            least_workers=least,
            save=save + AT_NOTICE,
            tier=self.tier,
            replicas=self.choice.replicas,
            fallback=LAST_MOMENT if late else "none",
            fallback_tries=NET.tries if late else 0,
        )

    def changed(self, candidate: Candidate | None = None, **choice: Any) -> Trial:
        """Return the trial with other choices, and with another cluster if one is given."""
        return replace(self, candidate=candidate or self.candidate, choice=replace(self.choice, **choice))

    def affordable(self, candidate: Candidate) -> bool:
        """True if the budget and the limits admit this cluster, with the fallback if there is one."""
        request, memory = self.board.request, [p for p in candidate.cluster if p.role == "memory"]
        usd = hourly_usd(candidate.cluster)
        if self.choice.fallback:
            usd += self.fallback_hourly_usd - hourly_usd(self.cluster)
        rows = self.board.memory

        def most(part: Part) -> float:
            here = (rows.instance == part.instance) & (rows.place == part.place)
            return min(request.max_nodes, float(rows.limit[here][0]))

        counted = all(part.count <= most(part) for part in memory)
        return counted and usd <= request.budget_usd + USD_TOLERANCE

    @property
    def fallback_hourly_usd(self) -> float:
        """What the cluster costs an hour with on-demand machines instead of its spot ones."""
        workers, row = self.board.workers, self.candidate.worker
        more_usd = float(workers.on_demand_usd[row] - workers.spot_usd[row])
        return hourly_usd(self.cluster) + self.spot_machines * more_usd

    def spells(self) -> YoungDalyByAge | None:
        """Return the save policy by the age of spells in this market; None for gangs that shrink."""
        if self.market is None or self.choice.least is not None:
            return None
        seen = observe(self.market.market(self.spot_machines, self.choice.columns, self.market.hours))
        spells = spells_of(seen, self.spot_machines, up=True) if seen[0].machines >= self.spot_machines else None
        if spells is None or not len(spells):
            return None
        law = fit_spells(spells, prior=TYPICAL_UP)
        rounded = policy_by_age(law, least_s=math.ceil(max(LEAST_INTERVAL_S, 2 * self.overheads.remote_s)))
        return replace(
            rounded, short_share=round(rounded.short_share, 3), short_s=round(rounded.short_s),
            long_s=round(rounded.long_s),
        )  # fmt: skip


def tier_of(cluster: Cluster) -> Tier:
    roles = {part.role for part in cluster}
    return "memory" if "memory" in roles else "anchor" if "anchor" in roles else "durable"


def speeds_of(space: Space, worker: int, nodes: int) -> tuple[float, ...]:
    """Return the speed of 0 to ``nodes`` machines over that of all of them, by the scaling curve."""
    performance = np.nan_to_num(space.performance[worker, :nodes])
    return (0.0, *np.minimum(1.0, performance[:-1] / performance[-1]).tolist(), 1.0)


def with_replicas(candidate: Candidate, replicas: int) -> Candidate:
    """Return the cluster with this multiple of its memory nodes."""
    cluster = tuple(replace(p, count=p.count * replicas) if p.role == "memory" else p for p in candidate.cluster)
    return replace(candidate, cluster=cluster)


def fallback_allowed(space: Space, worker: int, keeper_usd: Floats | float, nodes: NDArray[np.int64] | int) -> Floats:
    """Return where on-demand machines instead of all spot ones stay within the budget and the quota."""
    board = space.board
    usd = np.asarray(nodes * board.workers.on_demand_usd[worker] + keeper_usd)
    within = usd <= board.request.budget_usd + USD_TOLERANCE
    return np.asarray(within & (np.asarray(nodes) <= board.workers.on_demand_limit[worker]))


def losses_per_h(market: TypeMarket, machines: int, columns: Sequence[int], least: int | None) -> float:
    """Return how often a gang loses machines in an hour of training, over these zones."""
    capacity = np.minimum(market.gangs(machines)[list(columns)], machines)
    trains = capacity[:, :-1] >= (machines if least is None else least)
    lost = (trains & (capacity[:, 1:] < capacity[:, :-1])).sum()
    hours = trains.sum() * market.tick_s / 3600
    return float(lost / hours) if hours else 1.0
