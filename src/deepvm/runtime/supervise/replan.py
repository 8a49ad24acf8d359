"""A lost machine that the market does not have -> another type, at present prices and within the same budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np

from deepvm.catalog import Catalog, Market, Quota, library
from deepvm.errors import DeepvmError
from deepvm.plan import Request
from deepvm.plan.decide import plan as make_plan
from deepvm.plan.result import Plan
from deepvm.runtime.cluster import Cluster, Machine
from deepvm.units import format_usd

Replanned = tuple[Cluster, tuple[str, ...]]


class Replanner:
    """``load`` returns a catalogue by name, with today's prices and quotas."""

    def __init__(self, load: Callable[[str], Catalog] = library.load) -> None:
        self._load = load
        self._missing: set[tuple[str, str]] = set()  # type and market that there were none of

    def instead_of(self, cluster: Cluster, lost: Machine, why: str) -> Replanned | None:
        """Return the cluster with another type in the place of a lost machine; None if the budget allows none.

        One slow machine slows all of them: choose the cheapest type that is at least as fast, else the fastest."""
        self._missing.add((lost.instance, lost.market))
        try:
            request = _request(cluster)
            found = make_plan(_without(self._load(cluster.catalog), self._missing), replace(request, top=1))
        except DeepvmError:
            return None
        left_usd = request.budget_usd - sum(m.usd_per_hour for m in cluster.machines if m.name != lost.name)
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
        machines = tuple(instead if m.name == lost.name else m for m in cluster.machines)
        changed = replace(cluster, machines=machines)
        return changed, (
            f"{lost.name} is {instead.instance} ({instead.market}, {format_usd(instead.usd_per_hour)}/h) instead of "
            f"{lost.instance} ({format_usd(lost.usd_per_hour)}/h): {why}",
            f"the cluster costs {format_usd(changed.hourly_usd)}/h instead of {format_usd(cluster.hourly_usd)}/h, "
            f"of a budget of {format_usd(request.budget_usd)}/h",
        )


def _candidates(found: Plan, lost: Machine) -> list[tuple[Machine, float]]:
    """Return what could replace a machine, and how fast it trains. For memory nodes: those of the best cluster of each
    architecture."""
    if lost.role == "memory":
        roles = [role for best in found.architectures for role in best.roles if role.role == "memory"]
        return [
            (_as(lost, role.instance, role.usd_per_hour, role.usd_per_hour, role.region, role.zone), 0.0)
            for role in roles
            if role.market.value == lost.market
        ]
    return [
        (_as(lost, row.instance, price, row.on_demand_usd, row.region, row.zone), row.eflops)
        for row in found.instances
        if (price := row.spot_usd if lost.market == "spot" else row.on_demand_usd) is not None
    ]


def _as(
    lost: Machine, instance: str, usd: float, on_demand_usd: float | None, region: str, zone: str | None
) -> Machine:
    return replace(
        lost, instance=instance, usd_per_hour=usd, on_demand_usd_per_hour=on_demand_usd, region=region, zone=zone
    )


def _request(cluster: Cluster) -> Request:
    known = {field.name for field in fields(Request)}
    asked = {name: value for name, value in cluster.plan["request"].items() if name in known}
    asked["architectures"] = tuple(asked["architectures"])
    if asked.get("quotas") is not None:
        asked["quotas"] = tuple(
            Quota(
                families=tuple(quota["families"]),
                market=Market(quota["market"]),
                vcpus=quota["vcpus"],
                region=quota["region"],
            )
            for quota in asked["quotas"]
        )
    return Request(**asked)


def _eflops(cluster: Cluster, instance: str) -> float:
    return next((row["eflops"] for row in cluster.plan["instances"] if row["instance"] == instance), 0.0)


def _without(catalog: Catalog, missing: set[tuple[str, str]]) -> Catalog:
    """Return the catalogue without the offers that are sold out."""
    prices = {}
    for market, column in catalog.prices.items():
        gone = [
            catalog.index_by_name[name]
            for name, where in missing
            if where == market.value and name in catalog.index_by_name
        ]
        kept = ~np.isin(column.instance, gone)
        prices[market] = replace(
            column,
            instance=column.instance[kept],
            place=column.place[kept],
            usd_per_hour=column.usd_per_hour[kept],
            usd_low=None if column.usd_low is None else column.usd_low[kept],
            usd_high=None if column.usd_high is None else column.usd_high[kept],
            seen=column.seen[kept],
        )
    return replace(catalog, prices=prices)
