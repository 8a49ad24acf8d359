"""Update a catalogue: a source in, a checked file in the library and its changes out. Failures keep the old file."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Any

from deepvm.catalog import files, library
from deepvm.catalog.check import Severity, check
from deepvm.catalog.model import Catalog, Market
from deepvm.catalog.report import ImportReport, Progress
from deepvm.catalog.sources import aws, skypilot
from deepvm.errors import MalformedFile, SourceFailed, UnknownName, UsageError
from deepvm.json_fields import json_fields, json_value
from deepvm.units import USD_TOLERANCE

SOURCES = ("aws", "skypilot")
MAX_AGE_S = 3600.0  # spot prices change a few times a day
_Key = tuple[str, str, str | None, Market]


@dataclass(frozen=True, kw_only=True, slots=True)
class PriceMove:
    instance: str
    region: str
    zone: str | None
    market: Market
    usd_before: float
    usd_after: float

    @property
    def ratio(self) -> float:
        return self.usd_after / self.usd_before

    def to_json(self) -> dict[str, Any]:
        return json_fields(self, "instance region zone market usd_before usd_after")


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """The differences of two catalogues. ``moves`` are changed prices of offers that both have, largest first."""

    moves: tuple[PriceMove, ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]
    offers_before: int
    offers_after: int

    def to_json(self) -> dict[str, Any]:
        counts = json_fields(self, "offers_before offers_after")
        return {"moves": json_value(self.moves), "came": [*self.added], "went": [*self.removed], **counts}


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """``fresh`` is false if the kept catalogue was young enough; ``age_s`` is then its age."""

    catalog: Catalog
    path: Path
    fresh: bool
    age_s: float
    report: ImportReport | None = None
    changes: Changes | None = None  # None if there was no catalogue before


def update(
    source: str,
    *,
    region: str | None = None,
    name: str | None = None,
    url: str | None = None,
    provider: str = "aws",
    force: bool = False,
    progress: Progress | None = None,
    **fetch_options: Any,
) -> Update:
    """Read a source and write the result under ``name``; ``fetch_options`` are passed to ``aws.fetch``.

    The default name is that of its source: ``aws-us-east-1``, ``skypilot-aws``."""
    from deepvm.catalog.sources.download import download, public_address  # takes 30 ms

    if source not in SOURCES:
        raise UnknownName("source of catalogues", source, SOURCES)
    if source == "aws" and not region:
        raise UsageError("no AWS region given: add --region, as in --region us-east-1")
    if source == "aws" and url is not None:
        raise UsageError("--url is for --source skypilot: leave it out for AWS")
    name = name or (aws.default_name(region or "") if source == "aws" else skypilot.default_name(provider, region))
    path = library.path_of(name)
    address = url or skypilot.URL.format(provider=provider)
    origin = public_address(address)
    about = aws.description(region or "") if source == "aws" else skypilot.description(provider, origin, region)
    before = _previous(path)
    age_s = time.time() - path.stat().st_mtime if before is not None else -1.0
    if before is not None and not force and before.description == about and 0 <= age_s < MAX_AGE_S:
        return Update(catalog=before, path=path, fresh=False, age_s=age_s)
    report: ImportReport | None = None
    try:
        if source == "aws":
            catalog = aws.fetch(region or "", name=name, previous=before, progress=progress, **fetch_options)
        else:
            content = download(address, max_bytes=skypilot.MAX_BYTES, progress=progress)
            today = datetime.now(timezone.utc).date()
            catalog, report = skypilot.parse(
                content, origin, provider=provider, name=name, seen=today, region=region, origin=origin
            )
        return _replace(before, catalog, path, report)
    except (SourceFailed, MalformedFile) as error:
        if before is None:
            raise
        day = f" ({before.prices_seen[1]})" if before.prices_seen else ""
        raise SourceFailed(f"{error}; the catalogue {name!r} stays as it was{day}") from None


def import_file(path: Path, *, provider: str, name: str | None = None, seen: date | None = None) -> Update:
    """Read SkyPilot's catalogue CSV and write it under ``name``; the default is ``skypilot-PROVIDER``."""
    name = name or skypilot.default_name(provider)
    target = library.path_of(name)
    catalog, report = skypilot.read(path, provider=provider, name=name, seen=seen)
    return _replace(_previous(target), catalog, target, report)


def _replace(before: Catalog | None, catalog: Catalog, path: Path, report: ImportReport | None) -> Update:
    write_checked(catalog, path)
    changes = None if before is None else compare(before, catalog)
    return Update(catalog=catalog, path=path, fresh=True, age_s=0.0, report=report, changes=changes)


def write_checked(catalog: Catalog, path: Path) -> None:
    """Replace a catalogue's file. SourceFailed if the new one cannot be written, or has errors when read back."""
    try:
        files.write(catalog, path, check=_refuse_errors)
    except OSError as error:
        raise SourceFailed(f"{path} could not be written ({error.strerror or error})") from None


def _refuse_errors(catalog: Catalog) -> None:
    errors = [f for f in check(catalog, datetime.now(timezone.utc).date()) if f.severity is Severity.ERROR]
    if errors:
        raise SourceFailed(f"the new catalogue has errors: {errors[0].problem} ({errors[0].subject})")


def compare(before: Catalog, after: Catalog) -> Changes:
    old, new = _prices(before), _prices(after)
    moves = [
        PriceMove(instance=n, region=r, zone=z, market=m, usd_before=old[n, r, z, m], usd_after=usd)
        for (n, r, z, m), usd in new.items()
        if (n, r, z, m) in old and abs(usd - old[n, r, z, m]) > USD_TOLERANCE
    ]
    moves.sort(key=lambda move: -abs(move.ratio - 1))
    names_before, names_after = set(before.index_by_name), set(after.index_by_name)
    return Changes(
        moves=tuple(moves),
        added=tuple(sorted(names_after - names_before)),
        removed=tuple(sorted(names_before - names_after)),
        offers_before=len(old),
        offers_after=len(new),
    )


def _prices(catalog: Catalog) -> dict[_Key, float]:
    """Read the columns: a hundred thousand Offer objects would take a second."""
    result: dict[_Key, float] = {}
    for market, prices in catalog.prices.items():
        rows = zip(prices.instance.tolist(), prices.place.tolist(), prices.usd_per_hour.tolist(), strict=True)
        for instance, place, usd in rows:
            region, zone = catalog.places[place]
            result[catalog.instances[instance].name, region, zone, market] = usd
    return result


def _previous(path: Path) -> Catalog | None:
    """Read the catalogue to compare with. None for a broken file: the new one replaces it."""
    try:
        return files.read(path) if path.is_file() else None
    except MalformedFile:
        return None
