"""SkyPilot's catalogue: a CSV file in, a catalogue and a report of every row out.

Columns are found by name, since order and extras differ by provider. A row is kept, kept and flagged, or left out with
a reason. No row is dropped silently, and no missing value is invented.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable
from dataclasses import replace
from datetime import date, datetime, timezone
from functools import partial
from operator import itemgetter
from pathlib import Path

from deepvm import strict_json as strict
from deepvm.catalog import library
from deepvm.catalog.model import Catalog, Instance, Market, Place, Prices
from deepvm.catalog.report import ImportReport, Reasons
from deepvm.catalog.sources.skypilot_google import Half, Halves, with_bandwidths
from deepvm.catalog.sources.skypilot_types import InstanceTypes
from deepvm.errors import MalformedFile, UnknownName

URL = "https://raw.githubusercontent.com/skypilot-org/skypilot-catalog/master/catalogs/v8/{provider}/vms.csv"
MAX_BYTES = 256 * 2**20  # fifty times the largest published file
_NEEDED = ("InstanceType", "AcceleratorName", "AcceleratorCount", "vCPUs", "MemoryGiB", "Price", "Region")
_OPTIONAL = ("GpuInfo", "SpotPrice", "AvailabilityZone", "Arch")
_FACTS = ("InstanceType", "AcceleratorName", "AcceleratorCount", "vCPUs", "MemoryGiB", "GpuInfo", "Arch")
_BAD = -1.0  # marks an invalid price; NaN marks an absent one


def read(
    path: Path, *, provider: str, name: str, seen: date | None = None, region: str | None = None
) -> tuple[Catalog, ImportReport]:
    """Read a CSV file. Without ``seen``, its prices are those of the day of its last change."""
    content = strict.read_bytes(path, most_bytes=MAX_BYTES, hint="give a file of one provider")
    day = seen or datetime.fromtimestamp(path.stat().st_mtime, tz=timezone.utc).date()
    return parse(content, path, provider=provider, name=name, seen=day, region=region, origin=path.name)


def default_name(provider: str, region: str | None = None) -> str:
    """Return the default name of the provider's catalogue: ``skypilot-aws``."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(("skypilot", provider, *([region] if region else []))))


def description(provider: str, origin: str, region: str | None) -> str:
    return f"SkyPilot's catalogue of {provider}{f' in {region}' if region else ''}, from {origin}."


def parse(
    content: bytes,
    source: Path | str,
    *,
    provider: str,
    name: str,
    seen: date,
    region: str | None = None,
    origin: str,
) -> tuple[Catalog, ImportReport]:
    """Parse a file's content. Errors name it ``source``, the catalogue's description ``origin``."""
    types, table = InstanceTypes(provider), _Table(seen)
    _read_rows(content, source, region, types, table)
    instances, completed = _complete(types.instances, provider)
    note = "SkyPilot's file has neither bandwidths nor interruption rates"
    if completed:
        note += f"; those of {completed} types are from {library.DEFAULT if provider == 'aws' else 'Google'}"
    catalog = Catalog(
        name=name,
        provider=provider,
        description=description(provider, origin, region),
        instances=instances,
        places=tuple(table.places),
        prices={market: Prices.from_rows(rows) for market, rows in table.prices.items()},
        notes=(f"{note}.",),
    )
    report = ImportReport(
        rows=table.rows,
        kept=table.kept_rows,
        types=len(instances),
        offers=catalog.offer_count,
        completed_types=completed,
        flagged=table.flagged.counts(),
        left_out=table.left_out.counts(),
    )
    return catalog, report


class _Table:
    """The price rows and the report, while rows are read."""

    def __init__(self, seen: date) -> None:
        self.rows, self.kept_rows, self.day = 0, 0, seen.toordinal()
        self.places: dict[Place, int] = {}
        self.kept: set[tuple[int, int]] = set()
        self.flagged, self.left_out = Reasons(), Reasons()
        self.prices: dict[Market, list[tuple[int, int, float, int]]] = {market: [] for market in Market}
        self._amounts: dict[str, float] = {"": math.nan}

    def count(self, line: int, reason: str | None) -> None:
        """Count a row as kept, or as left out for a reason."""
        if reason is None:
            self.kept_rows += 1
        else:
            self.left_out.add(reason, line)

    def known(self, text: str) -> float:
        """Return an amount, NaN for none; what is not an amount stays below zero, also in a sum."""
        found = self.amount(text)
        return -math.inf if found == _BAD else found or math.nan

    def amount(self, text: str) -> float:
        found = self._amounts.get(text)
        if found is None:
            try:
                found = float(text)
            except ValueError:
                found = _BAD
            if not (math.isfinite(found) and found >= 0):
                found = _BAD
            self._amounts[text] = found
        return found


def _read_rows(content: bytes, source: Path | str, region: str | None, types: InstanceTypes, table: _Table) -> None:
    reader = csv.reader(io.StringIO(_text(content, source), newline=""), strict=True)
    other_regions: set[str] = set()
    halves = Halves() if types.provider == "gcp" else None
    try:
        header = next(reader, [])
        columns = _columns(header, source)
        facts = itemgetter(*(columns[name] for name in _FACTS))
        offer = itemgetter(*(columns[name] for name in ("Price", "SpotPrice", "Region", "AvailabilityZone")))
        for row in reader:
            if not row:
                continue
            table.rows += 1
            if len(row) != len(header):
                table.left_out.add("not as many fields as the header has", reader.line_num)
                continue
            row.append("")  # the value of a column that the file lacks
            price, spot, row_region, zone = offer(row)
            if region is not None and row_region != region:
                other_regions.add(row_region)
                table.left_out.add("in another region than asked", reader.line_num)
                continue
            half = Half(
                facts=facts(row), price=price, spot_price=spot, region=row_region, zone=zone, line=reader.line_num
            )
            if halves is None or not halves.take(half):
                table.count(reader.line_num, _add_offers(types, table, half))
        if halves is not None:
            for line, reason in halves.joined(partial(_add_offers, types, table), table.known):
                table.count(line, reason)
    except csv.Error as error:
        raise MalformedFile(source, f"not valid CSV: {error}", line=max(1, reader.line_num)) from None
    if region is not None and not table.kept and other_regions:
        raise UnknownName("region of this file", region, other_regions)
    if not table.kept:
        first = table.left_out.counts()
        if not first:
            raise MalformedFile(source, "no rows follow the column names", line=1)
        raise MalformedFile(source, f"no row can be used: {first[0].reason}", line=first[0].first_line)


def _add_offers(types: InstanceTypes, table: _Table, row: Half) -> str | None:
    """Add a row's offers to the table, or return the reason to leave it out."""
    usd, spot_usd = table.amount(row.price), table.amount(row.spot_price)
    facts, region, zone, line = row.facts, row.region, row.zone, row.line
    if usd == _BAD or spot_usd == _BAD:
        return "a price that is not an amount of zero or more"
    # Files write 0.00 if a market has no price.
    free_on_demand, free_spot = usd == 0, spot_usd == 0
    usd, spot_usd = usd or math.nan, spot_usd or math.nan
    if usd != usd and spot_usd != spot_usd:
        return "no price at all"
    if not region or "/" in region:
        return "no region, or one with a slash in its name"
    found = types.index_of(facts)
    if isinstance(found, str):
        return found
    index, flags = found
    place = (region, zone or None)
    place_index = table.places.setdefault(place, len(table.places))
    if (index, place_index) in table.kept:
        return "the same type and place as an earlier row"
    table.kept.add((index, place_index))
    for flag in flags:
        table.flagged.add(flag, line)
    if free_on_demand:
        table.flagged.add("on-demand price of zero (read as missing)", line)
    if free_spot:
        table.flagged.add("spot price of zero (read as missing)", line)
    if usd == usd:
        table.prices[Market.ON_DEMAND].append((index, place_index, usd, table.day))
        if spot_usd >= usd:
            table.flagged.add("spot at or above on-demand", line)
    else:
        table.flagged.add("no on-demand price", line)
    if spot_usd == spot_usd:
        table.prices[Market.SPOT].append((index, place_index, spot_usd, table.day))
    else:
        table.flagged.add("no spot price", line)
    return None


def _text(content: bytes, source: Path | str) -> str:
    if not content.strip():
        raise MalformedFile(source, "the file is empty: a SkyPilot catalogue starts with its column names", line=1)
    nul = content.find(b"\0")
    if nul >= 0:
        raise MalformedFile(
            source, "not a text file: a SkyPilot catalogue is CSV", line=content.count(b"\n", 0, nul) + 1
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise MalformedFile(source, "not UTF-8 text: a SkyPilot catalogue is CSV", line=line) from None


def _columns(header: list[str], source: Path | str) -> dict[str, int]:
    names = [name.strip() for name in header]
    absent = [name for name in _NEEDED if name not in names]
    if absent:
        raise MalformedFile(source, f"not a SkyPilot catalogue: it has no column {', '.join(absent)}", line=1)
    twice = [name for name in (*_NEEDED, *_OPTIONAL) if names.count(name) > 1]
    if twice:
        raise MalformedFile(source, f"the column {twice[0]} is there twice: remove one", line=1)
    return {name: names.index(name) if name in names else len(names) for name in (*_NEEDED, *_OPTIONAL)}


def _complete(instances: Iterable[Instance], provider: str) -> tuple[tuple[Instance, ...], int]:
    """Add bandwidths and interruption rates of the types that the built-in catalogue has."""
    if provider == "gcp":
        bare = tuple(instances)
        completed = with_bandwidths(bare)
        return completed, sum(before is not after for before, after in zip(bare, completed, strict=True))
    if provider != "aws":
        return tuple(instances), 0
    known = {instance.name: instance for instance in library.load(library.DEFAULT).instances}
    result = tuple(
        replace(
            instance,
            burst_gbps=known[instance.name].burst_gbps,
            sustained_gbps=known[instance.name].sustained_gbps,
            interruption_percent=known[instance.name].interruption_percent,
        )
        if instance.name in known
        else instance
        for instance in instances
    )
    return result, sum(instance.name in known for instance in result)
