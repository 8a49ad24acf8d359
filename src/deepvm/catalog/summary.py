"""A catalogue as people read it: one row per machine type, with the cheapest place of each market."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date

import numpy as np

from deepvm.catalog import accelerators
from deepvm.catalog.model import Catalog, Instance, Market
from deepvm.errors import UnknownName


@dataclass(frozen=True, kw_only=True, slots=True)
class Cheapest:
    """The lowest price of a type in a market, and where and when it was seen."""

    usd_per_hour: float
    region: str
    zone: str | None
    seen: date
    places: int  # in how many it is offered


@dataclass(frozen=True, kw_only=True, slots=True)
class TypeSummary:
    instance: Instance
    on_demand: Cheapest | None
    spot: Cheapest | None


def summarize(catalog: Catalog, *, instance: str | None = None, gpu: str | None = None) -> list[TypeSummary]:
    """Accelerated types first, each group by its lowest price; types without a price last."""
    wanted = range(len(catalog.instances))
    if instance is not None:
        wanted = range(catalog.index_by_name[catalog.instance(instance).name], len(catalog.instances))[:1]
    cheapest = {market: _cheapest(catalog, market) for market in Market}
    chosen = _with_gpu(catalog, gpu) if gpu is not None else None
    rows = [
        TypeSummary(
            instance=catalog.instances[i],
            on_demand=cheapest[Market.ON_DEMAND].get(i),
            spot=cheapest[Market.SPOT].get(i),
        )
        for i in wanted
        if chosen is None or catalog.instances[i].accelerator in chosen
    ]
    return sorted(rows, key=_order)


def _order(row: TypeSummary) -> tuple[bool, float, str]:
    usd = [c.usd_per_hour for c in (row.on_demand, row.spot) if c is not None]
    return row.instance.accelerator is None, min(usd, default=float("inf")), row.instance.name


def _with_gpu(catalog: Catalog, gpu: str) -> set[str]:
    """The catalogue's spellings of this accelerator."""
    present = {i.accelerator for i in catalog.instances if i.accelerator is not None}
    found = accelerators.spellings(gpu, present)
    if not found:
        raise UnknownName("accelerator in this catalogue", gpu, present)
    return found


def _cheapest(catalog: Catalog, market: Market) -> dict[int, Cheapest]:
    prices = catalog.prices.get(market)
    if prices is None or not len(prices):
        return {}
    order = np.lexsort((prices.usd_per_hour, prices.instance))
    present, first, places = np.unique(prices.instance[order], return_index=True, return_counts=True)
    result = {}
    for instance, row, count in zip(present.tolist(), order[first].tolist(), places.tolist(), strict=True):
        region, zone = catalog.places[prices.place[row]]
        result[instance] = Cheapest(
            usd_per_hour=float(prices.usd_per_hour[row]),
            region=region,
            zone=zone,
            seen=date.fromordinal(int(prices.seen[row])),
            places=count,
        )
    return result
