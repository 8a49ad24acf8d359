"""The JSON documents of ``deepvm catalog``: values of the catalogue room in, dictionaries out.

Fields are listed by hand: programs rely on them."""

from __future__ import annotations

from typing import Any

from deepvm.catalog import library
from deepvm.catalog.check import Finding
from deepvm.catalog.model import Catalog
from deepvm.catalog.summary import TypeSummary
from deepvm.catalog.update import Update
from deepvm.json_fields import json_fields, json_value

_INSTANCE = (
    "name family vcpus memory_gib accelerator accelerator_count accelerator_memory_gib architecture "
    "burst_gbps sustained_gbps interruption_percent eflops"
)


def overview(name: str, catalog: Catalog | str) -> dict[str, Any]:
    """Describe one line of the list; ``problem`` if the file cannot be read."""
    built_in = name in library.BUILT_IN
    if isinstance(catalog, str):
        return {"name": name, "built_in": built_in, "problem": catalog}
    return {"built_in": built_in, "problem": None, **_head(catalog)}


def contents(catalog: Catalog, rows: list[TypeSummary], *, offers_of: str | None) -> dict[str, Any]:
    document = {**_head(catalog), **json_fields(catalog, "saturation regions quotas")}
    document["instances"] = [
        {**json_fields(row.instance, _INSTANCE), **json_fields(row, "on_demand spot")} for row in rows
    ]
    if offers_of is not None:
        offers = catalog.offers(offers_of)
        document["offers"] = [json_fields(o, "market region zone usd_per_hour usd_low usd_high seen") for o in offers]
    return document


def updated(result: Update) -> dict[str, Any]:
    document = {"catalog": _head(result.catalog), "path": str(result.path)}
    return {**document, **json_fields(result, "fresh age_s report changes")}


def findings(catalog: Catalog, found: list[Finding]) -> dict[str, Any]:
    return {"name": catalog.name, "findings": [json_fields(f, "severity subject problem count") for f in found]}


def _head(catalog: Catalog) -> dict[str, Any]:
    seen = catalog.prices_seen
    return {
        **json_fields(catalog, "name provider description notes"),
        "types": len(catalog.instances),
        "accelerated_types": sum(i.accelerator is not None for i in catalog.instances),
        "offers": catalog.offer_count,
        "prices_seen": None if seen is None else {"oldest": json_value(seen[0]), "newest": json_value(seen[1])},
    }
