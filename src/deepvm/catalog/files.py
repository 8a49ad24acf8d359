"""The catalogue file: a catalogue in, one JSON document with prices as columns out, and back. The library uses it.

    {"format": "deepvm-catalog/1", "name": ..., "provider": ..., "description": ..., "saturation": ...,
     "instances": [{"name": "g4dn.xlarge", "vcpus": 4, ...}, ...],
     "places": ["us-east-1", "us-east-1/us-east-1a", ...],
     "prices": {"on-demand": {"instance": [names], "place": [indices], "usd_per_hour": [...],
                              "usd_low": [...], "usd_high": [...], "seen": "2026-08-22" or [days]},
                "spot": {...}},
     "quotas": [{"families": ["G"], "market": "spot", "vcpus": 128, "region": null}], "notes": [...]}

A column with the same value in every row may be that one value. The fields are listed by hand, so that the code can
change and the format cannot.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from deepvm.catalog.model import Catalog, Instance, Market, Place, Prices, Quota
from deepvm.errors import DeepvmError, MalformedFile

FORMAT = "deepvm-catalog/1"
_INSTANCE_FIELDS = (
    "name",
    "family",
    "vcpus",
    "memory_gib",
    "accelerator",
    "accelerator_count",
    "accelerator_memory_gib",
    "architecture",
    "burst_gbps",
    "sustained_gbps",
    "interruption_percent",
    "eflops",
    "speedup",
)
_SATURATION = ("bandwidth", "table")


def read(path: Path) -> Catalog:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise MalformedFile(path, f"it cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise MalformedFile(path, "not a text file: a catalogue is JSON") from None
    return parse(text, path)


def parse(text: str, path: Path | str) -> Catalog:
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise MalformedFile(path, f"not valid JSON: {error.msg}", line=error.lineno) from None
    except RecursionError:
        raise MalformedFile(path, "not a catalogue: it is nested too deeply") from None
    if not isinstance(document, dict) or "format" not in document:
        raise MalformedFile(path, f'not a catalogue: it has no "format": "{FORMAT}"')
    if document["format"] != FORMAT:
        raise MalformedFile(
            path, f"its format is {document['format']!r}, this deepvm reads {FORMAT!r}: use the deepvm that wrote it"
        )
    try:
        return _catalog(document)
    except DeepvmError as error:
        raise MalformedFile(path, str(error)) from None
    except KeyError as error:
        raise MalformedFile(path, f"not a valid {FORMAT}: {error.args[0]!r} is missing") from None
    except (TypeError, ValueError, AttributeError, OverflowError, IndexError) as error:
        raise MalformedFile(path, f"not a valid {FORMAT}: {error}") from None


def write(catalog: Catalog, path: Path, check: Callable[[Catalog], None] | None = None) -> None:
    """Replace a file, completely or not at all. ``check`` reads what was written, and may raise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(dumps(catalog))
            file.flush()
            os.fsync(file.fileno())
        if check is not None:
            check(read(Path(temporary)))
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def dumps(catalog: Catalog) -> str:
    head = {
        "format": FORMAT,
        "name": catalog.name,
        "provider": catalog.provider,
        "description": catalog.description,
        "saturation": catalog.saturation,
        "notes": list(catalog.notes),
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in head.items()]
    lines.append(f'"quotas": {_list_of(q.to_json() for q in catalog.quotas)}')
    lines.append(f'"instances": {_list_of(_instance_row(i) for i in catalog.instances)}')
    lines.append(f'"places": {json.dumps([_place_text(p) for p in catalog.places])}')
    markets = ",\n".join(
        f'"{market.value}": {{{_columns(catalog, prices)}}}' for market, prices in catalog.prices.items()
    )
    lines.append(f'"prices": {{\n{markets}\n}}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _list_of(rows: Any) -> str:
    return "[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]"


def _columns(catalog: Catalog, prices: Prices) -> str:
    columns: dict[str, Any] = {
        "instance": [catalog.instances[i].name for i in prices.instance],
        "place": prices.place.tolist(),
        "usd_per_hour": prices.usd_per_hour.tolist(),
    }
    for name in ("usd_low", "usd_high"):
        values = getattr(prices, name)
        if values is not None:
            columns[name] = [None if np.isnan(v) else v for v in values.tolist()]
    days = [date.fromordinal(d).isoformat() for d in prices.seen.tolist()]
    columns["seen"] = days[0] if len(set(days)) == 1 else days
    return ",\n".join(f'"{name}": {json.dumps(values)}' for name, values in columns.items())


def _instance_row(instance: Instance) -> dict[str, Any]:
    values = ((name, getattr(instance, name)) for name in _INSTANCE_FIELDS)
    return {name: value for name, value in values if value is not None and value != 0.0}


def _place_text(place: Place) -> str:
    region, zone = place
    return region if zone is None else f"{region}/{zone}"


def _catalog(document: Mapping[str, Any]) -> Catalog:
    instances = tuple(_instance(row) for row in document["instances"])
    index = {instance.name: i for i, instance in enumerate(instances)}
    if len(index) != len(instances):
        raise ValueError("an instance type is listed twice")
    places = tuple(_place(text) for text in document["places"])
    saturation = document.get("saturation", "bandwidth")
    if saturation not in _SATURATION:
        raise ValueError(f"saturation is {saturation!r}, known are {', '.join(_SATURATION)}")
    return Catalog(
        name=str(document["name"]),
        provider=str(document["provider"]),
        description=str(document["description"]),
        instances=instances,
        places=places,
        prices={Market(market): _prices(columns, index, len(places)) for market, columns in document["prices"].items()},
        quotas=tuple(
            Quota(
                families=tuple(row["families"]),
                market=Market(row["market"]),
                vcpus=row["vcpus"],
                region=row.get("region"),
            )
            for row in document.get("quotas", ())
        ),
        saturation=saturation,
        notes=tuple(document.get("notes", ())),
    )


def _instance(row: Mapping[str, Any]) -> Instance:
    unknown = row.keys() - set(_INSTANCE_FIELDS)
    if unknown:
        raise ValueError(f"{row.get('name')}: unknown field {sorted(unknown)[0]!r}")
    bucket = row.get("interruption_percent")
    return Instance(**{**row, "interruption_percent": None if bucket is None else tuple(bucket)})


def _place(text: str) -> Place:
    region, _, zone = text.partition("/")
    if not region:
        raise ValueError("a place has no region")
    return region, zone or None


def _prices(columns: Mapping[str, Any], index: Mapping[str, int], place_count: int) -> Prices:
    names = columns["instance"]
    count = len(names)
    try:
        instance = np.fromiter((index[name] for name in names), dtype=np.int32, count=count)
    except KeyError as error:
        raise ValueError(f"a price names {error.args[0]!r}, which is not among the instances") from None
    place = np.array(columns["place"], dtype=np.int32)
    if place.shape != (count,) or (count and not 0 <= place.min() <= place.max() < place_count):
        raise ValueError("a price is in a place that is not listed")
    usd = np.array(columns["usd_per_hour"], dtype=np.float64)
    if usd.shape != (count,):
        raise ValueError(f"{count} instances have {usd.size} prices")
    wrong = np.flatnonzero(~(np.isfinite(usd) & (usd > 0)))
    if wrong.size:
        raise ValueError(f"the price of {names[wrong[0]]} is {usd[wrong[0]]}, it must be above zero")
    bounds = {name: np.array(columns[name], dtype=np.float64) for name in ("usd_low", "usd_high") if name in columns}
    if any(b.shape != (count,) for b in bounds.values()):
        raise ValueError("usd_low and usd_high need one value per price")
    return Prices(
        instance=instance,
        place=place,
        usd_per_hour=usd,
        usd_low=bounds.get("usd_low"),
        usd_high=bounds.get("usd_high"),
        seen=_days(columns["seen"], count),
    )


def _days(seen: str | list[str], count: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    if isinstance(seen, str):
        return np.full(count, date.fromisoformat(seen).toordinal(), dtype=np.int32)
    if len(seen) != count:
        raise ValueError("seen needs one day per price")
    ordinals = {day: date.fromisoformat(day).toordinal() for day in set(seen)}
    return np.fromiter((ordinals[day] for day in seen), dtype=np.int32, count=count)
