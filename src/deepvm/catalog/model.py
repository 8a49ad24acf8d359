"""The values of a catalogue: what can be rented, where, in which market, at what price. Sources make them.

Missing data is ``None`` (NaN in columns), never zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from enum import Enum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepvm.errors import UnknownName, UsageError
from deepvm.json_fields import json_fields

LEAST, MOST = 1e-9, 1e9  # of vCPUs, GiB, Gbit/s and eFLOPS: sums and ratios of these stay finite
LEAST_USD, MOST_USD = 1e-6, 1e6  # an hour
STALE_DAYS = 31  # spot prices move by tens of percent in a month


class Market(str, Enum):
    ON_DEMAND = "on-demand"
    SPOT = "spot"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, kw_only=True, slots=True)
class Instance:
    """One machine type. Bandwidth is in Gbit/s; ``sustained`` is the rate after a burst."""

    name: str
    family: str | None = None  # the letters that vCPU quotas use: G, P, C ...
    vcpus: float | None = None
    memory_gib: float | None = None
    accelerator: str | None = None
    accelerator_count: float = 0.0  # fractional for a slice of a GPU
    accelerator_memory_gib: float | None = None  # of each
    architecture: str | None = None  # x86_64 or arm64
    burst_gbps: float | None = None
    sustained_gbps: float | None = None
    interruption_percent: tuple[float, float] | None = None  # of spot machines in a month: from, to
    eflops: float | None = None  # measured; an estimate is never stored here
    speedup: Mapping[str, Any] | None = None  # a measured curve, as deepvm.performance.curve_from_spec reads it
    cloud: str | None = None  # in a catalogue joined from several; else its provider

    def __post_init__(self) -> None:
        if not self.name:
            raise UsageError("an instance type has no name")
        for what in ("vcpus", "memory_gib", "accelerator_memory_gib", "burst_gbps", "sustained_gbps", "eflops"):
            value = getattr(self, what)
            if value is not None and not LEAST <= value <= MOST:
                raise UsageError(f"{self.name}: {what} is {value}, it must be from {LEAST:g} to {MOST:g} or absent")
        if (self.accelerator is None) != (self.accelerator_count == 0):
            raise UsageError(f"{self.name}: an accelerator needs a count, and a count an accelerator")
        if not 0 <= self.accelerator_count <= MOST:
            raise UsageError(f"{self.name}: accelerator_count is {self.accelerator_count}, it must be 0 to {MOST:g}")
        if self.architecture not in (None, "x86_64", "arm64"):
            raise UsageError(f"{self.name}: architecture is {self.architecture!r}, not x86_64 or arm64")

    @property
    def gbps(self) -> float | None:
        """The bandwidth to plan with: sustained if known, else burst."""
        return self.sustained_gbps if self.sustained_gbps is not None else self.burst_gbps


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """An instance in one place and market. ``zone`` is None if the price holds for a whole region."""

    instance: Instance
    region: str
    zone: str | None
    market: Market
    usd_per_hour: float
    usd_low: float | None  # the range over the zones of a regional price
    usd_high: float | None
    seen: date


@dataclass(frozen=True, kw_only=True, slots=True)
class Quota:
    """The vCPUs of these families that may run at once in a market, in one region or (None) in any."""

    families: tuple[str, ...]
    market: Market
    vcpus: float
    region: str | None = None

    def __post_init__(self) -> None:
        if not self.families or not (math.isfinite(self.vcpus) and self.vcpus >= 0):
            raise UsageError(f"a quota needs families, and vCPUs of zero or more: found {self}")

    @property
    def name(self) -> str:
        where = f" in {self.region}" if self.region else ""
        return f"{'/'.join(self.families)} {self.market}{where}"

    def to_json(self) -> dict[str, Any]:
        return json_fields(self, "families market vcpus region")

    def closeness(self, instance: Instance) -> int:
        """Rate how exactly the families match an instance, 0 for no match. ``P`` matches p4d and p5en; ``P5`` matches
        p5 and p5en, more exactly; ``P5EN`` matches p5en only, most exactly."""
        return max(_closeness(family.upper(), instance) for family in self.families)


def _closeness(family: str, instance: Instance) -> int:
    own = (instance.family or "").upper()
    if not own:
        return 0
    series = instance.name.upper().partition(".")[0]
    if family in (own, series):
        return 2 * len(family) + (family == series)
    more_exact = family[-1:].isdigit() and series.startswith(family) and not series[len(family) :][:1].isdigit()
    wider = own.startswith(family) and own[len(family) :].isdigit()
    return 2 * len(family) if more_exact or wider else 0


def binding_quotas(quotas: Sequence[Quota], instance: Instance, market: Market, region: str) -> tuple[Quota, ...]:
    """Return the quotas that count a machine: for its market and region, those that match it most exactly.

    AWS counts P5 separately if it has a quota for P5, else with the other P types."""
    rated = [(q.closeness(instance), q) for q in quotas if q.market is market and q.region in (None, region)]
    closest = max((close for close, _ in rated), default=0)
    return tuple(q for close, q in rated if close == closest > 0)


FloatColumn = NDArray[np.float64]
IndexColumn = NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class Prices:
    """The offers of one market as columns. ``instance`` and ``place`` index the catalogue's tuples."""

    instance: IndexColumn
    place: IndexColumn
    usd_per_hour: FloatColumn
    usd_low: FloatColumn | None = None
    usd_high: FloatColumn | None = None
    seen: IndexColumn  # proleptic days (date.toordinal)

    @classmethod
    def from_rows(cls, rows: Iterable[tuple[int, int, float, int]]) -> Prices:
        """Make columns of (instance, place, USD an hour, day seen as an ordinal)."""
        types = {"instance": np.int32, "place": np.int32, "usd_per_hour": np.float64, "seen": np.int32}
        table = np.fromiter(rows, dtype=list(types.items()))
        return cls(**{name: table[name].copy() for name in types})

    def __len__(self) -> int:
        return len(self.instance)


Place = tuple[str, str | None]


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """Instances and their offers. ``saturation`` names the network model of its figures."""

    name: str
    provider: str
    description: str
    instances: tuple[Instance, ...]
    places: tuple[Place, ...]
    prices: Mapping[Market, Prices]
    quotas: tuple[Quota, ...] = ()
    saturation: str = "bandwidth"
    notes: Sequence[str] = field(default=())
    clouds: tuple[str, ...] = ()  # of each place, in a catalogue joined from several

    @cached_property
    def index_by_name(self) -> Mapping[str, int]:
        return {instance.name: i for i, instance in enumerate(self.instances)}

    def instance(self, name: str) -> Instance:
        index = self.index_by_name.get(name)
        if index is None:
            raise UnknownName("instance type", name, self.index_by_name)
        return self.instances[index]

    @property
    def accelerators(self) -> set[str]:
        return {i.accelerator for i in self.instances if i.accelerator is not None}

    @property
    def regions(self) -> list[str]:
        return sorted({region for region, _ in self.places})

    def cloud_of(self, instance: Instance) -> str:
        return instance.cloud or self.provider

    def cloud_at(self, place: int) -> str:
        return self.clouds[place] if self.clouds else self.provider

    @cached_property
    def region_of_place(self) -> NDArray[np.int64]:
        """The region of each place, as a number: clouds may have regions of the same name."""
        numbers: dict[tuple[str, str], int] = {}
        keys = ((self.cloud_at(p), region) for p, (region, _) in enumerate(self.places))
        return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)

    @property
    def zones(self) -> list[str]:
        return sorted({zone for _, zone in self.places if zone is not None})

    def offers(self, instance: str | None = None) -> Iterator[Offer]:
        """Yield the offers of one instance type or of all. For reading; searches use the columns."""
        wanted = None if instance is None else self.index_by_name[self.instance(instance).name]
        for market, prices in self.prices.items():
            rows = range(len(prices)) if wanted is None else np.flatnonzero(prices.instance == wanted).tolist()
            yield from (self.offer(market, row) for row in rows)

    def offer(self, market: Market, row: int) -> Offer:
        """Return the offer in one row of a market's columns."""
        prices = self.prices[market]
        region, zone = self.places[prices.place[row]]
        return Offer(
            instance=self.instances[prices.instance[row]],
            region=region,
            zone=zone,
            market=market,
            usd_per_hour=float(prices.usd_per_hour[row]),
            usd_low=None if prices.usd_low is None else _known(prices.usd_low[row]),
            usd_high=None if prices.usd_high is None else _known(prices.usd_high[row]),
            seen=date.fromordinal(int(prices.seen[row])),
        )

    @property
    def prices_seen(self) -> tuple[date, date] | None:
        """The oldest and the newest day on which a price was seen."""
        columns = [p.seen for p in self.prices.values() if len(p)]
        if not columns:
            return None
        seen = np.concatenate(columns)
        return date.fromordinal(int(seen.min())), date.fromordinal(int(seen.max()))

    @property
    def offer_count(self) -> int:
        return sum(map(len, self.prices.values()))


def _known(value: float) -> float | None:
    return None if math.isnan(value) else float(value)
