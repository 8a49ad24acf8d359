"""A machine that the market does not have -> another type, at present prices and within the same budget.

What the run has measured so far counts: the size of its checkpoints, and how long it takes to recover."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from deepvm.catalog import Catalog, Market, Quota, library
from deepvm.catalog.model import Prices
from deepvm.errors import DeepvmError, UsageError
from deepvm.performance.profile import Profile, profile_of
from deepvm.plan import Request
from deepvm.plan.job_facts import JobFacts
from deepvm.plan.planner import plan as make_plan
from deepvm.plan.profiles import Ratings
from deepvm.plan.result import InstanceAnalysis, Plan, Recommendation, Role
from deepvm.runtime.cluster import Cluster, Machine
from deepvm.runtime.supervise.gang import Gang, MoveCost, in_place, moved
from deepvm.strict_json import MalformedJson
from deepvm.units import format_bytes, format_seconds, format_usd

LESS_IS_BETTER = ("cost", "time")  # of the objectives
BACKOFF_S, MOST_BACKOFF_S = 300.0, 3600.0  # until a type that the market refused is asked for again
Replanned = tuple[Cluster, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class _Refusal:
    until_s: float  # not asked for again before
    wait_s: float


class Replanner:
    """``load`` returns a catalogue by name, with today's prices and quotas; ``measured`` what the run has measured so
    far, if anything."""

    def __init__(
        self,
        load: Callable[[str], Catalog] = library.load,
        measured: Callable[[], Profile | None] = lambda: None,
        *,
        gang: Gang | None = None,
        threshold: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``gang`` moves all machines that train at once. ``threshold`` is for ``better``: by how much a plan must be
        better, as a share."""
        self._load, self._measured, self._gang, self._threshold = load, measured, gang, threshold
        self._clock = clock
        self._refusals: dict[tuple[str, str], _Refusal] = {}  # by type and market

    def refused(self, machine: Machine) -> None:
        """Remember that the market does not have this type now. A type that is refused again soon after the wait waits
        for twice as long."""
        key, now_s = (machine.instance, machine.market), self._clock()
        last = self._refusals.get(key)
        if last is not None and now_s < last.until_s:
            return
        again = last is not None and now_s < last.until_s + last.wait_s
        wait_s = min(2 * last.wait_s, MOST_BACKOFF_S) if last is not None and again else BACKOFF_S
        self._refusals[key] = _Refusal(now_s + wait_s, wait_s)

    @property
    def _missing(self) -> set[tuple[str, str]]:
        """Return types and markets that are not asked for at present."""
        now_s = self._clock()
        return {key for key, refusal in self._refusals.items() if now_s < refusal.until_s}

    def instead_of(self, cluster: Cluster, lost: Machine, why: str) -> Replanned | None:
        """Return the cluster with something else instead of a lost machine; None if the budget allows nothing.

        The gang moves first, if it may; then come the types of the plan's failover list, in its order; then all others:
        one slow machine slows all of them, so choose the cheapest type that is at least as fast, else the fastest."""
        self.refused(lost)
        if self._gang is not None and any(machine.name == lost.name for machine in cluster.gang):
            return self._gang.instead_of(cluster, lost, why)
        try:
            request, learned = _with_measurements(_request(cluster), self._measured())
        except (DeepvmError, MalformedJson):
            return None
        left_usd = request.budget_usd - sum(m.usd_per_hour for m in cluster.machines if m.name != lost.name)
        listed = () if learned else self._failover(cluster, lost)  # the list is for checkpoints of the planned size
        planned = next((m for m in listed if m.usd_per_hour <= left_usd), None)
        if planned is not None:
            return self._replaced(cluster, lost, planned, request, why, ("it is next in the plan's failover list",))
        try:
            found = make_plan(_without(self._load(cluster.catalog), self._missing), replace(request, top=1))
        except (DeepvmError, MalformedJson):
            return None
        rated = [
            (machine, eflops)
            for machine, eflops in _candidates(found, lost)
            if machine.usd_per_hour <= left_usd
            and machine.region == (lost.region or machine.region)
            and (machine.instance, lost.market) not in self._missing
        ]
        if not rated:
            return None
        needed = _eflops(cluster, lost.instance)
        fast = [machine for machine, eflops in rated if eflops >= needed]
        instead = min(fast, key=lambda m: m.usd_per_hour) if fast else max(rated, key=lambda pair: pair[1])[0]
        forecast = found.recommendations[0].restore if found.recommendations else None
        restore_s = forecast.on_demand_s if forecast is not None and forecast.measured else cluster.restore_s
        if restore_s != cluster.restore_s and restore_s is not None:
            learned += (
                f"a loss is expected to stop training for {format_seconds(restore_s)}, as this run measured it",
            )
        return self._replaced(replace(cluster, restore_s=restore_s), lost, instead, request, why, learned)

    def better(self, cluster: Cluster) -> Replanned | None:
        """Return the cluster elsewhere, or of another type, if that is better now by more than the threshold."""
        if self._gang is not None:
            return self._gang.better(cluster)
        if self._threshold is None or not cluster.gang:
            return None
        try:
            request, _ = _with_measurements(_request(cluster), self._measured())
            catalog = _without(self._load(cluster.catalog), self._missing)
            found = make_plan(catalog, replace(request, top=1))
        except (DeepvmError, MalformedJson):
            return None
        old, best = cluster.gang[0], found.recommendations[0]
        worker = best.worker
        if worker.instance == old.instance or worker.market is not Market.SPOT:
            return None
        gain = _gain(best, _without_others(catalog, request, found, old.instance))
        if gain <= self._threshold:
            return None
        row = next(row for row in found.instances if row.instance == worker.instance)
        new = replace(
            old, instance=worker.instance, region=worker.region, zone=worker.zone, usd_per_hour=worker.usd_per_hour,
            on_demand_usd_per_hour=row.on_demand_usd,
        )  # fmt: skip
        better = f"{best.objective} is better by {gain:.0%}" if math.isfinite(gain) else "nothing else fits the budget"
        why = f"{better} at today's prices"
        return moved(cluster, in_place(cluster, new), why, MoveCost.of(cluster, self._measured()))

    def _failover(self, cluster: Cluster, lost: Machine) -> Iterator[Machine]:
        """Yield what the plan's failover list has instead of a lost machine, in its order: in the same region, where
        the others are."""
        for machine in cluster.failover:
            same = (machine.role, machine.market) == (lost.role, lost.market)
            near = machine.region == (lost.region or machine.region)
            if same and near and (machine.instance, machine.market) not in self._missing:
                yield replace(machine, name=lost.name)

    def _replaced(
        self, cluster: Cluster, lost: Machine, instead: Machine, request: Request, why: str, learned: Sequence[str]
    ) -> Replanned:
        machines = tuple(instead if m.name == lost.name else m for m in cluster.machines)
        changed = replace(cluster, machines=machines)
        return changed, (
            f"{lost.name} is {instead.instance} ({instead.market}, {format_usd(instead.usd_per_hour)}/h) instead of "
            f"{lost.instance} ({format_usd(lost.usd_per_hour)}/h): {why}",
            f"the cluster costs {format_usd(changed.hourly_usd)}/h instead of {format_usd(cluster.hourly_usd)}/h, "
            f"of a budget of {format_usd(request.budget_usd)}/h",
            *learned,
        )


def _without_others(catalog: Catalog, request: Request, found: Plan, instance: str) -> Recommendation | None:
    """Return the best plan with workers of this type alone; None if there is none."""
    others = {(row.instance, market.value) for row in found.instances if row.instance != instance for market in Market}
    try:
        return make_plan(_without(catalog, others), replace(request, top=1)).recommendations[0]
    except DeepvmError:
        return None


def _gain(best: Recommendation, present: Recommendation | None) -> float:
    """Return by how much one plan is better than another, as a share of the worse value."""
    if present is None:
        return math.inf
    values = best.objective_value, present.objective_value
    high, low = values if best.objective not in LESS_IS_BETTER else values[::-1]
    return high / low - 1 if low > 0 else 0.0


def _candidates(found: Plan, lost: Machine) -> list[tuple[Machine, float]]:
    """Return possible replacements of a machine, and how fast they train. For memory nodes: those of each
    architecture's best cluster."""

    def machine(row: Role | InstanceAnalysis, usd: float, on_demand_usd: float | None) -> Machine:
        priced = replace(lost, usd_per_hour=usd, on_demand_usd_per_hour=on_demand_usd)
        return replace(priced, instance=row.instance, region=row.region, zone=row.zone)

    if lost.role == "memory":
        roles = [role for best in found.architectures for role in best.roles]
        return [
            (machine(role, role.usd_per_hour, role.usd_per_hour), 0.0)
            for role in roles
            if role.role == "memory" and role.market.value == lost.market
        ]
    return [
        (machine(row, usd, row.on_demand_usd), row.eflops)
        for row in found.instances
        if (usd := row.spot_usd if lost.market == "spot" else row.on_demand_usd) is not None
    ]


def _request(cluster: Cluster) -> Request:
    known = {field.name for field in fields(Request)}
    asked = {name: value for name, value in cluster.plan["request"].items() if name in known}
    if asked.get("architectures") is not None:
        asked["architectures"] = tuple(asked["architectures"])
    if asked.get("quotas") is not None:
        asked["quotas"] = tuple(
            Quota(families=tuple(q["families"]), market=Market(q["market"]), vcpus=q["vcpus"], region=q["region"])
            for q in asked["quotas"]
        )
    try:
        asked["profiles"] = tuple(profile_of(document) for document in asked.get("profiles", ()))
    except MalformedJson as error:
        raise DeepvmError(f"the plan's profiles cannot be read: {error}") from None
    if asked.get("ratings") is not None:
        asked["ratings"] = Ratings.from_json(asked["ratings"])
    if asked.get("job") is not None:
        try:
            asked["job"] = JobFacts.from_json(asked["job"])
        except MalformedJson as error:
            raise UsageError(f"the plan's job cannot be read: {error}") from None
    return Request(**asked)


def _with_measurements(request: Request, measured: Profile | None) -> tuple[Request, tuple[str, ...]]:
    """Return the request with what the run measured, and sentences about what that changes."""
    if measured is None:
        return request, ()
    request = replace(request, profiles=(*request.profiles, measured))
    size = max((point.state_bytes for point in measured.overheads), default=request.checkpoint_bytes)
    if size == request.checkpoint_bytes:
        return request, ()
    was = format_bytes(request.checkpoint_bytes)
    return replace(request, checkpoint_bytes=size), (
        f"checkpoints have {format_bytes(size)}, as this run measured, and not the planned {was}",
    )


def _eflops(cluster: Cluster, instance: str) -> float:
    return next((row["eflops"] for row in cluster.plan["instances"] if row["instance"] == instance), 0.0)


def _without(catalog: Catalog, missing: set[tuple[str, str]]) -> Catalog:
    """Return the catalogue without types that are sold out in a market."""
    prices, index = {}, catalog.index_by_name
    for market, table in catalog.prices.items():
        sold_out = [index[name] for name, where in missing if where == market.value and name in index]
        kept = ~np.isin(table.instance, sold_out)
        columns = {each.name: getattr(table, each.name) for each in fields(table)}
        rows: dict[str, Any] = {name: column[kept] for name, column in columns.items() if column is not None}
        prices[market] = Prices(**rows)
    return replace(catalog, prices=prices)
