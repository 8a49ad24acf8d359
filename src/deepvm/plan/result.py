"""A plan as values and as JSON: clusters of the search in, what commands and runs read out."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date
from typing import TYPE_CHECKING, Any

import numpy as np

from deepvm.catalog import Catalog, Market
from deepvm.json_fields import json_fields, json_value
from deepvm.performance.restore import RestoreTime
from deepvm.plan.architectures import Part, RoleName
from deepvm.plan.request import Request
from deepvm.plan.search.board import LeftOut

if TYPE_CHECKING:
    from deepvm.plan.rehearsal.written import Replay
    from deepvm.plan.risk.search import Found
    from deepvm.policy.conduct import Conduct
    from deepvm.simulate.risk import Risk

FORMAT = "deepvm-plan/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """Machines of one type with the same role in the cluster, the price of one, and the day it was seen."""

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
    cloud: str | None = None  # if the catalogue is joined from several

    def to_json(self) -> dict[str, Any]:
        names = "role instance market count region zone usd_per_hour usd_low usd_high"
        cloud = {} if self.cloud is None else {"cloud": self.cloud}
        return {**json_fields(self, names), "price_seen": self.seen.isoformat(), **cloud}

    @property
    def place(self) -> str:
        """For people: ``us-east-1a``, or with its cloud if there are several."""
        return " ".join(filter(None, (self.cloud, self.zone or self.region)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """The speedup curve behind a figure. ``measured`` is the range of measured sizes."""

    instance: str
    spec: dict[str, Any]
    scaling: float  # at the cluster's size
    measured: tuple[int, int] | None

    def to_json(self) -> dict[str, Any]:
        figures = {"scaling": self.scaling, "measured_nodes": json_value(self.measured)}
        return {"instance": self.instance, **self.spec, **figures}


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoreForecast:
    """An estimate of the time that the cluster loses if all workers are lost and restore at once."""

    state_bytes: int
    workers: int
    memory_nodes: int  # that serve them; an anchor counts as one
    time: RestoreTime  # whole state, fresh workers, one stage after another
    on_demand_s: float  # the total if bytes arrive while workers start, and optimizer state after the first loss
    measured: tuple[str, ...] = ()  # overheads that profiles had; the others have defaults

    def to_json(self) -> dict[str, Any]:
        sizes = json_fields(self, "state_bytes workers memory_nodes")
        total = {"on_demand_total_s": self.on_demand_s, "measured": list(self.measured)}
        return {**sizes, **self.time.to_json(), **total}


@dataclass(frozen=True, kw_only=True, eq=False)
class Expected:
    """What replays of a recommendation gave, over many starts."""

    risk: Risk
    notes: tuple[str, ...] = ()  # what the history does not show

    @property
    def cost_usd(self) -> float:
        return self.risk.mean_usd

    @property
    def hours(self) -> float:
        return self.risk.mean_h

    @property
    def missed(self) -> float:
        return self.risk.missed

    @property
    def guess(self) -> bool:
        """True if the history is too short, or of another accelerator."""
        return not self.risk.history.enough

    def to_json(self) -> dict[str, Any]:
        return {**self.risk.to_json(), "notes": list(self.notes)}


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
    estimates: tuple[str, ...]  # the estimated figures
    restore: RestoreForecast | None = None  # None if no machine of the cluster keeps checkpoints
    expected: Expected | None = None  # under a market
    conduct: Conduct | None = None  # with which that is expected
    replay: Replay | None = None  # what else a replay of it needs
    traffic_usd_per_hour: float = 0.0  # between zones, in ``hourly_usd``
    memory_failure_per_day: float | None = None  # the chance that a memory node fails; None without memory nodes

    @property
    def worker(self) -> Role:
        """The most numerous type of the workers."""
        return max((r for r in self.roles if r.role == "worker"), key=lambda r: r.count)

    def to_json(self) -> dict[str, Any]:
        return {
            **json_fields(self, "rank architecture roles nodes hourly_usd performance"),
            "objective": {"name": self.objective, "value": self.objective_value},
            **json_fields(self, "curves network estimates restore traffic_usd_per_hour memory_failure_per_day"),
            **({} if self.expected is None else {"expected": self.expected.to_json()}),
            **({} if self.conduct is None else {"conduct": self.conduct.to_json()}),
            **({} if self.replay is None else {"replay": self.replay.to_json()}),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceAnalysis:
    """Stage 2's row for one GPU type, in the place with its lowest spot price."""

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
        place = "region zone spot_usd on_demand_usd spot_flopp on_demand_flopp"
        return json_fields(self, f"instance accelerator eflops eflops_estimated {place}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The four stages: the request, the rated instances, the best of each architecture, and the decision."""

    request: Request
    catalog: str
    instances: tuple[InstanceAnalysis, ...]
    architectures: tuple[Recommendation, ...]
    recommendations: tuple[Recommendation, ...]
    left_out: tuple[LeftOut, ...]
    failover: tuple[Recommendation, ...] = ()  # of other types or places, the best first
    notes: tuple[str, ...] = ()  # of the catalogue, on its prices
    advice: tuple[str, ...] = ()
    found: Found | None = field(default=None, repr=False, compare=False)  # under a market; not in the JSON

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            **json_fields(
                self, "catalog request instances architectures recommendations failover left_out notes advice"
            ),
        }


def role_of(catalog: Catalog, part: Part) -> Role:
    prices = catalog.prices[part.market]
    region, zone = catalog.places[part.place]
    of_region = catalog.region_of_place == catalog.region_of_place[part.place]
    valid = [p for p in np.flatnonzero(of_region) if p == part.place or catalog.places[p][1] is None]
    rows = np.flatnonzero((prices.instance == part.instance) & np.isin(prices.place, valid))
    offer = catalog.offer(part.market, int(rows[np.argmin(prices.usd_per_hour[rows])]))
    return Role(
        role=part.role,
        instance=offer.instance.name,
        market=part.market,
        count=part.count,
        region=region,
        zone=zone,
        usd_per_hour=part.usd_per_hour,
        usd_low=offer.usd_low,
        usd_high=offer.usd_high,
        seen=offer.seen,
        cloud=catalog.clouds[part.place] if catalog.clouds else None,
    )
