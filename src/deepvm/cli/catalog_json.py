"""The JSON documents of ``deepvm catalog``. Fields are listed by hand: programs rely on them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from deepvm.catalog import library
from deepvm.catalog.check import Finding
from deepvm.catalog.model import Catalog, Instance, Offer
from deepvm.catalog.report import ImportReport
from deepvm.catalog.summary import Cheapest, TypeSummary
from deepvm.catalog.update import Changes, Update


def overview(name: str, catalog: Catalog | str) -> dict[str, Any]:
    """One line of the list; ``problem`` where the file cannot be read."""
    built_in = name in library.BUILT_IN
    if isinstance(catalog, str):
        return {"name": name, "built_in": built_in, "problem": catalog}
    return {"built_in": built_in, "problem": None, **_head(catalog)}


def contents(catalog: Catalog, rows: list[TypeSummary], *, offers_of: str | None) -> dict[str, Any]:
    document = _head(catalog)
    document["saturation"] = catalog.saturation
    document["regions"] = catalog.regions
    document["quotas"] = [
        {"families": list(q.families), "market": q.market.value, "vcpus": q.vcpus, "region": q.region}
        for q in catalog.quotas
    ]
    document["instances"] = [
        {**_instance(row.instance), "on_demand": _cheapest(row.on_demand), "spot": _cheapest(row.spot)} for row in rows
    ]
    if offers_of is not None:
        document["offers"] = [_offer(offer) for offer in catalog.offers(offers_of)]
    return document


def updated(result: Update) -> dict[str, Any]:
    return {
        "catalog": _head(result.catalog),
        "path": str(result.path),
        "fresh": result.fresh,
        "age_s": result.age_s,
        "report": None if result.report is None else _report(result.report),
        "changes": None if result.changes is None else _changes(result.changes),
    }


def findings(catalog: Catalog, found: list[Finding]) -> dict[str, Any]:
    return {
        "name": catalog.name,
        "findings": [
            {"severity": f.severity.value, "subject": f.subject, "problem": f.problem, "count": f.count} for f in found
        ],
    }


def _head(catalog: Catalog) -> dict[str, Any]:
    seen = catalog.prices_seen
    return {
        "name": catalog.name,
        "provider": catalog.provider,
        "description": catalog.description,
        "notes": list(catalog.notes),
        "types": len(catalog.instances),
        "accelerated_types": sum(i.accelerator is not None for i in catalog.instances),
        "offers": sum(map(len, catalog.prices.values())),
        "prices_seen": None if seen is None else {"oldest": str(seen[0]), "newest": str(seen[1])},
    }


def _instance(instance: Instance) -> dict[str, Any]:
    bucket = instance.interruption_percent
    return {
        "name": instance.name,
        "family": instance.family,
        "vcpus": instance.vcpus,
        "memory_gib": instance.memory_gib,
        "accelerator": instance.accelerator,
        "accelerator_count": instance.accelerator_count,
        "accelerator_memory_gib": instance.accelerator_memory_gib,
        "architecture": instance.architecture,
        "burst_gbps": instance.burst_gbps,
        "sustained_gbps": instance.sustained_gbps,
        "interruption_percent": None if bucket is None else list(bucket),
        "eflops": instance.eflops,
    }


def _cheapest(cheapest: Cheapest | None) -> dict[str, Any] | None:
    if cheapest is None:
        return None
    return {
        "usd_per_hour": cheapest.usd_per_hour,
        "region": cheapest.region,
        "zone": cheapest.zone,
        "seen": str(cheapest.seen),
        "places": cheapest.places,
    }


def _offer(offer: Offer) -> dict[str, Any]:
    return {
        "market": offer.market.value,
        "region": offer.region,
        "zone": offer.zone,
        "usd_per_hour": offer.usd_per_hour,
        "usd_low": offer.usd_low,
        "usd_high": offer.usd_high,
        "seen": str(offer.seen),
    }


def _report(report: ImportReport) -> dict[str, Any]:
    return {
        "rows": report.rows,
        "kept": report.kept,
        "types": report.types,
        "offers": report.offers,
        "completed_types": report.completed_types,
        "flagged": [asdict(tally) for tally in report.flagged],
        "left_out": [asdict(tally) for tally in report.left_out],
    }


def _changes(changes: Changes) -> dict[str, Any]:
    return {
        "moves": [
            {
                "instance": move.instance,
                "region": move.region,
                "zone": move.zone,
                "market": move.market.value,
                "usd_before": move.usd_before,
                "usd_after": move.usd_after,
            }
            for move in changes.moves
        ],
        "came": list(changes.came),
        "went": list(changes.went),
        "offers_before": changes.offers_before,
        "offers_after": changes.offers_after,
    }
