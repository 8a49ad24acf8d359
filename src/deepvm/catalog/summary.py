"""A catalogue as people read it: a catalogue in, one row per machine type with its cheapest offers out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from deepvm.catalog import accelerators
from deepvm.catalog.model import Catalog, Instance, Market, Offer
from deepvm.json_fields import json_fields


@dataclass(frozen=True, kw_only=True, slots=True)
class Cheapest:
    """The cheapest offer of a type in a market, and the number of places that offer it."""

    offer: Offer
    places: int

    def to_json(self) -> dict[str, Any]:
        return {**json_fields(self.offer, "usd_per_hour region zone seen"), "places": self.places}


@dataclass(frozen=True, kw_only=True, slots=True)
class TypeSummary:
    instance: Instance
    on_demand: Cheapest | None
    spot: Cheapest | None


def summarize(catalog: Catalog, *, instance: str | None = None, gpu: str | None = None) -> list[TypeSummary]:
    """Sort accelerated types first, each group by its lowest price; types without a price last."""
    instances = catalog.instances if instance is None else (catalog.instance(instance),)
    if gpu is not None:
        named = accelerators.spellings(gpu, catalog.accelerators)
        instances = tuple(i for i in instances if i.accelerator in named)
    on_demand, spot = (_cheapest(catalog, market) for market in (Market.ON_DEMAND, Market.SPOT))
    indices = [(i, catalog.index_by_name[i.name]) for i in instances]
    return sorted(
        (TypeSummary(instance=i, on_demand=on_demand.get(n), spot=spot.get(n)) for i, n in indices), key=_order
    )


def _order(row: TypeSummary) -> tuple[bool, float, str]:
    usd = [c.offer.usd_per_hour for c in (row.on_demand, row.spot) if c is not None]
    return row.instance.accelerator is None, min(usd, default=float("inf")), row.instance.name


def _cheapest(catalog: Catalog, market: Market) -> dict[int, Cheapest]:
    prices = catalog.prices.get(market)
    if prices is None:
        return {}
    order = np.lexsort((prices.usd_per_hour, prices.instance))
    present, first, places = np.unique(prices.instance[order], return_index=True, return_counts=True)
    return {
        instance: Cheapest(offer=catalog.offer(market, row), places=count)
        for instance, row, count in zip(present.tolist(), order[first].tolist(), places.tolist(), strict=True)
    }
