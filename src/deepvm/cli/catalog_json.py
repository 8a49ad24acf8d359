"""The JSON documents of ``deepvm catalog``: values of the catalogue room in, dictionaries out.

Fields are listed by hand: programs rely on them."""

from __future__ import annotations

from datetime import date
from typing import Any

import numpy as np

from deepvm.catalog import library
from deepvm.catalog.check import Finding
from deepvm.catalog.model import Catalog
from deepvm.catalog.summary import TypeSummary
from deepvm.catalog.update import Update
from deepvm.json_fields import json_fields, json_value
from deepvm.market.catalog_history import HistoryImport
from deepvm.market.history import PriceHistory

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


def updated(result: Update, past: PriceHistory | None = None) -> dict[str, Any]:
    document = {"catalog": _head(result.catalog), "path": str(result.path)}
    document |= json_fields(result, "fresh age_s report changes")
    return document if past is None else {**document, "history": _span(past)}


def history_import(report: HistoryImport) -> dict[str, Any]:
    paths = {"path": str(report.path), "history_path": str(report.history_path)}
    return {"catalog": _head(report.catalog), **paths, "days": report.days, "history": _span(report.history)}


def price_history(
    history: PriceHistory, type_: str, *, market: str | None = None, days: int | None = None
) -> dict[str, Any]:
    """Describe the prices of a type in every place; figures count each day of the span once."""
    first = history.first
    if days is not None:
        first = max(first, date.fromordinal(max(1, history.last.toordinal() - days + 1)))
    rows = []
    for key in history.keys(type_, market=market):
        prices = history.daily(key, first, history.last)
        known = prices[np.isfinite(prices)]
        figures = np.percentile(known, (0, 50, 75, 100)).tolist() if known.size else [None] * 4
        now = history.at_key(key, history.last)
        changes = zip(*(column.tolist() for column in history.changes[key]), strict=True)
        rows.append(
            {
                "cloud": key[0],
                "place": key[2],
                "market": key[3],
                "usd_per_hour": None if now is None else now.usd_per_h,
                **dict(zip(("lowest", "median", "p75", "highest"), figures, strict=True)),
                "changes": [
                    {"day": date.fromordinal(day).isoformat(), "usd_per_hour": None if usd != usd else usd}
                    for day, usd in changes
                    if day >= first.toordinal()
                ],
            }
        )
    return {"type": type_, "from": first.isoformat(), "to": history.last.isoformat(), "places": rows}


def _span(history: PriceHistory) -> dict[str, Any]:
    changes = sum(len(days) for days, _ in history.changes.values())
    span = {"from": history.first.isoformat(), "to": history.last.isoformat(), "days_seen": len(history.seen)}
    return {**span, "prices": len(history.changes), "changes": changes}


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
