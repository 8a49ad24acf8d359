"""What a plan says, as values, and as the JSON that users and other commands rely on."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from typing import Any

import numpy as np

from deepvm.catalog import Catalog, Instance, Market
from deepvm.performance.restore import RestoreTime
from deepvm.plan.architectures import Part, RoleName
from deepvm.plan.request import Request
from deepvm.plan.search.board import LeftOut

FORMAT = "deepvm-plan/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """Some machines of one type that do the same in the cluster, with the price of one and the day it was seen."""

    role: RoleName
    instance: str
    market: Market
    count: int
    region: str
    zone: str | None
    usd_per_hour: float
    usd_low: float | None
    usd_high: float | None
    seen: date

    def to_json(self) -> dict[str, Any]:
        return {
            "role": self.role,
            "instance": self.instance,
            "market": self.market.value,
            "count": self.count,
            "region": self.region,
            "zone": self.zone,
            "usd_per_hour": self.usd_per_hour,
            "usd_low": self.usd_low,
            "usd_high": self.usd_high,
            "price_seen": self.seen.isoformat(),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """The speedup curve that stands behind a figure. ``measured`` is the range of sizes it was measured in."""

    instance: str
    spec: dict[str, Any]
    scaling: float  # at the cluster's size
    measured: tuple[int, int] | None

    def to_json(self) -> dict[str, Any]:
        measured = None if self.measured is None else list(self.measured)
        return {"instance": self.instance, **self.spec, "scaling": self.scaling, "measured_nodes": measured}


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoreForecast:
    """An estimate of how long the cluster stands still when its workers were lost and come back, all at once."""

    state_bytes: int
    workers: int
    memory_nodes: int  # that serve them; an anchor is one
    time: RestoreTime  # whole state, fresh workers, one stage after another
    on_demand_s: float  # the total where bytes come while workers start, and optimizer state after the first loss

    def to_json(self) -> dict[str, Any]:
        return {
            "state_bytes": self.state_bytes,
            "workers": self.workers,
            "memory_nodes": self.memory_nodes,
            **self.time.to_json(),
            "on_demand_total_s": self.on_demand_s,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    rank: int
    architecture: str
    roles: tuple[Role, ...]
    nodes: int  # machines that train
    hourly_usd: float
    performance: float  # eFLOPS × n × scaling, whatever the objective
    objective: str
    objective_value: float
    curves: tuple[Curve, ...]
    network: str
    estimates: tuple[str, ...]  # which of the figures behind it are estimates
    restore: RestoreForecast | None = None  # None where no machine of the cluster keeps checkpoints

    @property
    def worker(self) -> Role:
        """The role that gives the cluster its name: its workers, the most numerous type of them."""
        return max((r for r in self.roles if r.role == "worker"), key=lambda r: r.count)

    def to_json(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "architecture": self.architecture,
            "roles": [role.to_json() for role in self.roles],
            "nodes": self.nodes,
            "hourly_usd": self.hourly_usd,
            "performance": self.performance,
            "objective": {"name": self.objective, "value": self.objective_value},
            "curves": [curve.to_json() for curve in self.curves],
            "network": self.network,
            "estimates": list(self.estimates),
            "restore": None if self.restore is None else self.restore.to_json(),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceAnalysis:
    """Stage 2's line for one GPU type, in the place where its spot price is lowest."""

    instance: str
    accelerator: str
    eflops: float
    eflops_estimated: bool
    region: str
    zone: str | None
    spot_usd: float | None
    on_demand_usd: float | None

    @property
    def spot_flopp(self) -> float | None:
        return None if self.spot_usd is None else self.eflops / self.spot_usd

    @property
    def on_demand_flopp(self) -> float | None:
        return None if self.on_demand_usd is None else self.eflops / self.on_demand_usd

    def to_json(self) -> dict[str, Any]:
        return {
            "instance": self.instance,
            "accelerator": self.accelerator,
            "eflops": self.eflops,
            "eflops_estimated": self.eflops_estimated,
            "region": self.region,
            "zone": self.zone,
            "spot_usd": self.spot_usd,
            "on_demand_usd": self.on_demand_usd,
            "spot_flopp": self.spot_flopp,
            "on_demand_flopp": self.on_demand_flopp,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The four stages: the request, the instances' worth, the best of each architecture, and the decision."""

    request: Request
    catalog: str
    instances: tuple[InstanceAnalysis, ...]
    architectures: tuple[Recommendation, ...]
    recommendations: tuple[Recommendation, ...]
    left_out: tuple[LeftOut, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "catalog": self.catalog,
            "request": self.request.to_json(),
            "instances": [row.to_json() for row in self.instances],
            "architectures": [r.to_json() for r in self.architectures],
            "recommendations": [r.to_json() for r in self.recommendations],
            "left_out": [{"reason": x.reason, "count": x.count, "example": x.example} for x in self.left_out],
        }


def role_of(catalog: Catalog, part: Part) -> Role:
    prices = catalog.prices[part.market]
    region, zone = catalog.places[part.place]
    here = [p for p, place in enumerate(catalog.places) if place in ((region, zone), (region, None))]
    rows = np.flatnonzero((prices.instance == part.instance) & np.isin(prices.place, here))
    row = int(rows[np.argmin(prices.usd_per_hour[rows])])
    instance: Instance = catalog.instances[part.instance]
    return Role(
        role=part.role,
        instance=instance.name,
        market=part.market,
        count=part.count,
        region=region,
        zone=zone,
        usd_per_hour=part.usd_per_hour,
        usd_low=_known(prices.usd_low, row),
        usd_high=_known(prices.usd_high, row),
        seen=date.fromordinal(int(prices.seen[row])),
    )


def _known(column: Any, row: int) -> float | None:
    return None if column is None or np.isnan(column[row]) else float(column[row])
