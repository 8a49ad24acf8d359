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

from deepvm import strict_json as strict
from deepvm.catalog.model import (
    LEAST,
    LEAST_USD,
    MOST,
    MOST_USD,
    Catalog,
    IndexColumn,
    Instance,
    Market,
    Place,
    Prices,
    Quota,
)
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
_TEXTS = ("name", "family", "accelerator", "architecture")
_SATURATION = ("bandwidth", "table")
MOST_BYTES = 256 * 2**20
MOST_VALUES = 16_000_000  # a row of prices has six
_HINT = "list catalogues with: deepvm catalog list"


def read(path: Path) -> Catalog:
    return parse(strict.read_bytes(path, most_bytes=MOST_BYTES, hint=_HINT), path)


def parse(text: str | bytes, path: Path | str) -> Catalog:
    try:
        document = strict.loads(text, most_bytes=MOST_BYTES, most_values=MOST_VALUES)
    except strict.MalformedJson as error:
        raise MalformedFile(path, f"not a catalogue: {error}") from None
    if not isinstance(document, dict) or "format" not in document:
        raise MalformedFile(path, f'not a catalogue: it has no "format": "{FORMAT}"')
    if document["format"] != FORMAT:
        found = strict.brief(document["format"])
        raise MalformedFile(path, f"its format is {found}, this deepvm reads {FORMAT!r}: use the deepvm that wrote it")
    try:
        return _catalog(document)
    except DeepvmError as error:
        raise MalformedFile(path, str(error)) from None
    except strict.MalformedJson as error:
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
    rows = strict.array(strict.member(document, "instances"), "instances")
    instances = tuple(_instance(strict.table(row, "an instance")) for row in rows)
    index = {instance.name: i for i, instance in enumerate(instances)}
    if len(index) != len(instances):
        raise strict.MalformedJson("an instance type is listed twice")
    places = tuple(_place(text) for text in strict.texts(strict.member(document, "places"), "places"))
    saturation = document.get("saturation", "bandwidth")
    if saturation not in _SATURATION:
        raise strict.MalformedJson(f"saturation is {strict.brief(saturation)}, known are {', '.join(_SATURATION)}")
    prices = strict.table(strict.member(document, "prices"), "prices")
    return Catalog(
        name=_text(document, "name"),
        provider=_text(document, "provider"),
        description=_text(document, "description"),
        instances=instances,
        places=places,
        prices={
            _market(name): _prices(strict.table(columns, name), index, len(places)) for name, columns in prices.items()
        },
        quotas=tuple(_quota(row) for row in strict.array(document.get("quotas", []), "quotas")),
        saturation=saturation,
        notes=tuple(strict.texts(document.get("notes", []), "notes")),
    )


def _instance(row: Mapping[str, Any]) -> Instance:
    name = _text(row, "name")
    for field, value in row.items():
        what = f"{strict.brief(field)} of {strict.brief(name)}"
        if field not in _INSTANCE_FIELDS:
            raise strict.MalformedJson(f"{what} is an unknown field")
        if value is None:
            continue
        if field in _TEXTS:
            _checked_text(value, what)
        elif field == "speedup":
            strict.table(value, what)
        elif field == "interruption_percent":
            if len(strict.numbers(value, what, 0, 100)) != 2:
                raise strict.MalformedJson(f"{what} is {strict.brief(value)}, not two percentages")
        else:
            strict.number(value, what, 0 if field == "accelerator_count" else LEAST, MOST)
    bucket = row.get("interruption_percent")
    given = {**row, "accelerator_count": row.get("accelerator_count") or 0.0}
    return Instance(**{**given, "interruption_percent": None if bucket is None else tuple(bucket)})


def _quota(row: Any) -> Quota:
    table = strict.table(row, "a quota")
    return Quota(
        families=tuple(strict.texts(strict.member(table, "families"), "the families of a quota")),
        market=_market(strict.member(table, "market")),
        vcpus=strict.number(strict.member(table, "vcpus"), "vcpus of a quota", 0, MOST),
        region=None if table.get("region") is None else _text(table, "region"),
    )


def _text(row: Mapping[str, Any], name: str) -> str:
    return _checked_text(strict.member(row, name), name)


def _checked_text(value: Any, what: str) -> str:
    """Check text of any characters: names come from providers' files."""
    if type(value) is not str:
        raise strict.MalformedJson(f"{what} is {strict.brief(value)}, which is not text")
    return value


def _market(value: Any) -> Market:
    try:
        return Market(value)
    except ValueError:
        raise strict.MalformedJson(f"market is {strict.brief(value)}, not on-demand or spot") from None


def _place(text: str) -> Place:
    region, _, zone = text.partition("/")
    if not region:
        raise strict.MalformedJson("a place has no region")
    return region, zone or None


def _prices(columns: Mapping[str, Any], index: Mapping[str, int], place_count: int) -> Prices:
    names = strict.texts(strict.member(columns, "instance"), "instance")
    count = len(names)
    try:
        instance = np.fromiter((index[name] for name in names), dtype=np.int32, count=count)
    except KeyError as error:
        raise strict.MalformedJson(
            f"a price names {strict.brief(error.args[0])}, which is not among the instances"
        ) from None
    place = strict.numbers(strict.member(columns, "place"), "place", 0, place_count - 1, whole=True)
    usd = strict.numbers(strict.member(columns, "usd_per_hour"), "usd_per_hour", LEAST_USD, MOST_USD)
    bounds = {
        name: strict.numbers(columns[name], name, LEAST_USD, MOST_USD, missing=True)
        for name in ("usd_low", "usd_high")
        if name in columns
    }
    for name, column in {"place": place, "usd_per_hour": usd, **bounds}.items():
        if len(column) != count:
            raise strict.MalformedJson(f"{count} instances have {len(column)} values of {name}, one each is needed")
    low, high = (
        np.array(bounds[name], dtype=np.float64) if name in bounds else None for name in ("usd_low", "usd_high")
    )
    return Prices(
        instance=instance,
        place=np.array(place, dtype=np.int32),
        usd_per_hour=np.array(usd, dtype=np.float64),
        usd_low=low,
        usd_high=high,
        seen=_days(strict.member(columns, "seen"), count),
    )


def _days(seen: Any, count: int) -> IndexColumn:
    if isinstance(seen, str):
        return np.full(count, _day(seen), dtype=np.int32)
    if len(strict.texts(seen, "seen")) != count:
        raise strict.MalformedJson("seen needs one day per price")
    ordinals = {text: _day(text) for text in set(seen)}
    return np.fromiter((ordinals[text] for text in seen), dtype=np.int32, count=count)


def _day(text: str) -> int:
    try:
        return date.fromisoformat(text).toordinal()
    except ValueError:
        raise strict.MalformedJson(f"seen has {strict.brief(text)}, not a day like 2026-08-22") from None
