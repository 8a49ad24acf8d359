"""Several catalogues in, one out, whose places and instances know their cloud. The library and commands call it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from deepvm.catalog.model import Catalog, Instance, Market, Place, Prices, Quota
from deepvm.errors import UsageError

SEPARATOR = "+"  # in the name of a joined catalogue


def joined(catalogs: Sequence[Catalog]) -> Catalog:
    """Join catalogues. Where several have a fact or a price of the same machine, the first one's counts."""
    parts = list({catalog.name: catalog for catalog in catalogs}.values())
    if not parts:
        raise UsageError("no catalogue to join: name at least one")
    if len(parts) == 1:
        return parts[0]
    table = next((catalog.name for catalog in parts if catalog.saturation != "bandwidth"), None)
    if table is not None:
        raise UsageError(f"{table} is made for the paper's network table: plan it alone")
    providers = list(dict.fromkeys(catalog.provider for catalog in parts))
    several = len(providers) > 1
    instances: dict[str, Instance] = {}
    places: dict[tuple[str, Place], int] = {}
    numbers = []
    for catalog in parts:
        for instance in catalog.instances:
            own = replace(instance, cloud=catalog.provider) if several else instance
            known = instances.setdefault(instance.name, own)
            if known.cloud != own.cloud:
                raise UsageError(f"{known.cloud} and {own.cloud} both have a type {own.name}: plan them one by one")
        numbers.append([places.setdefault((catalog.provider, place), len(places)) for place in catalog.places])
    index = {name: i for i, name in enumerate(instances)}
    return Catalog(
        name=SEPARATOR.join(catalog.name for catalog in parts),
        provider=SEPARATOR.join(providers),
        description=" ".join(catalog.description for catalog in parts),
        instances=tuple(instances.values()),
        places=tuple(place for _, place in places),
        prices={market: _prices(parts, market, index, numbers, len(places)) for market in Market},
        quotas=tuple(quota for catalog in parts for quota in _quotas(catalog)),
        notes=tuple(note for catalog in parts for note in catalog.notes),
        clouds=tuple(cloud for cloud, _ in places) if several else (),
    )


def _prices(
    parts: Sequence[Catalog], market: Market, index: dict[str, int], numbers: Sequence[Sequence[int]], places: int
) -> Prices:
    columns: dict[str, list[np.ndarray[tuple[int], np.dtype[np.generic]]]] = {}
    for catalog, number in zip(parts, numbers, strict=True):
        prices = catalog.prices.get(market)
        if prices is None:
            continue
        new_index = np.array([index[instance.name] for instance in catalog.instances], dtype=np.int32)
        unknown = np.full(len(prices), np.nan)
        for name, column in (
            ("instance", new_index[prices.instance]),
            ("place", np.array(number, dtype=np.int32)[prices.place]),
            ("usd_per_hour", prices.usd_per_hour),
            ("usd_low", unknown if prices.usd_low is None else prices.usd_low),
            ("usd_high", unknown if prices.usd_high is None else prices.usd_high),
            ("seen", prices.seen),
        ):
            columns.setdefault(name, []).append(column)
    if not columns:
        return Prices.from_rows(())
    whole = {name: np.concatenate(found) for name, found in columns.items()}
    keys = whole["instance"].astype(np.int64) * max(1, places) + whole["place"]
    _, first = np.unique(keys, return_index=True)
    return Prices(**{name: column[np.sort(first)] for name, column in whole.items()})


def _quotas(catalog: Catalog) -> Iterable[Quota]:
    """Yield the quotas, each for its own region: without one it would count machines of other catalogues."""
    for quota in catalog.quotas:
        regions = catalog.regions if quota.region is None else [quota.region]
        yield from (replace(quota, region=region) for region in regions)
