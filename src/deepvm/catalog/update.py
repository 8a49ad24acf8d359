"""Bring a kept catalogue up to date, without ever losing the last good one."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Any

from deepvm.catalog import files, library
from deepvm.catalog.check import Severity, check
from deepvm.catalog.model import Catalog, Market
from deepvm.catalog.report import ImportReport
from deepvm.catalog.sources import aws, skypilot
from deepvm.errors import MalformedFile, SourceFailed, UnknownName, UsageError
from deepvm.units import USD_TOLERANCE

SOURCES = ("aws", "skypilot")
MAX_AGE_S = 3600.0  # spot prices change a few times a day
Progress = Callable[[str], None]
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """What differs between two catalogues. ``moves`` are prices of offers that both have, largest first."""

    moves: tuple[PriceMove, ...]
    came: tuple[str, ...]
    went: tuple[str, ...]
    offers_before: int
    offers_after: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """``fresh`` is false where the kept catalogue was young enough; ``age_s`` is then its age."""

    catalog: Catalog
    path: Path
    fresh: bool
    age_s: float
    report: ImportReport | None = None
    changes: Changes | None = None  # None where there was no catalogue before


def update(
    source: str,
    *,
    region: str | None = None,
    name: str | None = None,
    url: str | None = None,
    provider: str = "aws",
    max_age_s: float = MAX_AGE_S,
    force: bool = False,
    progress: Progress | None = None,
    **fetch_options: Any,
) -> Update:
    """Read a source and keep the result under ``name``; ``fetch_options`` go to ``aws.fetch``.

    Without a name it is called after where it is from: ``aws-us-east-1``, ``skypilot-aws``."""
    from deepvm.catalog.sources.download import download, public_address  # 30 ms that no other command should pay

    if source not in SOURCES:
        raise UnknownName("source of catalogues", source, SOURCES)
    if source == "aws" and not region:
        raise UsageError("an AWS region is needed: add --region us-east-1, say")
    if source == "aws" and url is not None:
        raise UsageError("--url belongs to --source skypilot: AWS is read through its own interfaces")
    name = name or (aws.default_name(region or "") if source == "aws" else skypilot.default_name(provider, region))
    path = library.path_of(name)
    address = url or skypilot.URL.format(provider=provider)
    origin = public_address(address)
    about = aws.description(region or "") if source == "aws" else skypilot.description(provider, origin, region)
    before = _kept(path)
    age_s = time.time() - path.stat().st_mtime if before is not None else -1.0
    if before is not None and not force and before.description == about and 0 <= age_s < max_age_s:
        return Update(catalog=before, path=path, fresh=False, age_s=age_s)
    report: ImportReport | None = None
    try:
        if source == "aws":
            assert region is not None  # noqa: S101 - checked above
            catalog = aws.fetch(region, name=name, previous=before, progress=progress, **fetch_options)
        else:
            content = download(address, max_bytes=skypilot.MAX_BYTES, progress=progress)
            today = datetime.now(timezone.utc).date()
            catalog, report = skypilot.parse(
                content, origin, provider=provider, name=name, seen=today, region=region, origin=origin
            )
        keep(catalog, path)
    except (SourceFailed, MalformedFile) as error:
        if before is None:
            raise
        raise SourceFailed(f"{error}; the catalogue {name!r} stays as it was{_of_day(before)}") from None
    changes = None if before is None else compare(before, catalog)
    return Update(catalog=catalog, path=path, fresh=True, age_s=0.0, report=report, changes=changes)


def import_file(path: Path, *, provider: str, name: str | None = None, seen: date | None = None) -> Update:
    """Read SkyPilot's catalogue CSV and keep it under ``name``, or under ``skypilot-aws`` and so on."""
    name = name or skypilot.default_name(provider)
    target = library.path_of(name)
    before = _kept(target)
    catalog, report = skypilot.read(path, provider=provider, name=name, seen=seen)
    keep(catalog, target)
    changes = None if before is None else compare(before, catalog)
    return Update(catalog=catalog, path=target, fresh=True, age_s=0.0, report=report, changes=changes)


def keep(catalog: Catalog, path: Path) -> None:
    """Write aside, read back, check, and only then take the place of what was there."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.incoming")
    try:
        files.write(catalog, aside)
        readback = files.read(aside)
        today = datetime.now(timezone.utc).date()
        grave = [f for f in check(readback, today) if f.severity is Severity.ERROR]
        if grave:
            raise SourceFailed(f"the new catalogue is unsound: {grave[0].problem} ({grave[0].subject})")
        os.replace(aside, path)
    except OSError as error:
        raise SourceFailed(f"{path} could not be written ({error.strerror or error})") from None
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)


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
        came=tuple(sorted(names_after - names_before)),
        went=tuple(sorted(names_before - names_after)),
        offers_before=len(old),
        offers_after=len(new),
    )


def _prices(catalog: Catalog) -> dict[_Key, float]:
    """Straight from the columns: a hundred thousand Offer objects would take a second."""
    result: dict[_Key, float] = {}
    for market, prices in catalog.prices.items():
        rows = zip(prices.instance.tolist(), prices.place.tolist(), prices.usd_per_hour.tolist(), strict=True)
        for instance, place, usd in rows:
            region, zone = catalog.places[place]
            result[catalog.instances[instance].name, region, zone, market] = usd
    return result


def _kept(path: Path) -> Catalog | None:
    """The catalogue to compare with. A broken file is no reason not to replace it with a good one."""
    try:
        return files.read(path) if path.is_file() else None
    except MalformedFile:
        return None


def _of_day(catalog: Catalog) -> str:
    seen = catalog.prices_seen
    newest: date | None = seen[1] if seen else None
    return f" ({newest})" if newest else ""
