"""Catalogues over time: a git clone, AWS or a day in; price histories in the library, and a catalogue as it was out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from deepvm.catalog import library
from deepvm.catalog.model import Catalog, Instance, Market, Place, Prices
from deepvm.catalog.report import Progress
from deepvm.catalog.sources import git_history, skypilot
from deepvm.catalog.sources.aws_history import fetch_history
from deepvm.catalog.update import Changes, compare, write_checked
from deepvm.errors import UsageError
from deepvm.market.history import PriceHistory, Row

RECENT_DAYS = 30
_SUFFIX = ".history.csv.gz"
_DATED = re.compile(r"(.+)@(\d{4}-\d{2}-\d{2})\Z")


@dataclass(frozen=True, kw_only=True, slots=True)
class HistoryImport:
    """What an import stored: the catalogue of the last day, and all changes of prices."""

    catalog: Catalog
    path: Path
    history: PriceHistory
    history_path: Path
    days: int


def history_path(name: str) -> Path:
    """Return the file of a catalogue's price history, beside the catalogue."""
    return library.path_of(name).with_name(name + _SUFFIX)


def histories() -> list[str]:
    """List the catalogues that have a price history."""
    folder = library.directory()
    return sorted(p.name.removesuffix(_SUFFIX) for p in folder.glob(f"*{_SUFFIX}")) if folder.is_dir() else []


def load_history(name: str | None = None) -> PriceHistory:
    """Load a history by the catalogue's name, or from a CSV file. Without a name: the only one there is."""
    if name is None:
        known = histories()
        if len(known) != 1:
            names = f"there are {', '.join(known)}" if known else "there is none yet"
            raise UsageError(f"no price history chosen ({names}): name it with --catalog, or import one with --git")
        name = known[0]
    if "/" in name or name.endswith((".csv", ".csv.gz")):
        return PriceHistory.read(Path(name))
    if not has_history(name):
        raise UsageError(
            f"the catalogue {name!r} has no price history: import one with deepvm catalog import --git REPO "
            "--from DATE --to DATE, or read AWS with deepvm catalog update --source aws --history DAYS"
        )
    return PriceHistory.read(history_path(name))


def import_git(
    repository: Path,
    *,
    first: date,
    last: date,
    provider: str = "aws",
    name: str | None = None,
    progress: Progress | None = None,
) -> HistoryImport:
    """Read a clone of SkyPilot's catalogue repository, one file a day, and keep catalogue and history under ``name``.

    Histories imported before stay: days that both have are replaced."""
    name = name or skypilot.default_name(provider)
    path = library.path_of(name)
    wanted = git_history.snapshots(repository, provider=provider, first=first, last=last)
    known = _Union()
    dated = git_history.read_all(repository, wanted, provider=provider, name=name, progress=progress)
    history = PriceHistory.from_catalogs(known.watch(dated))
    catalog = known.newest()
    target = history_path(name)
    if target.is_file():
        history = PriceHistory.read(target).merged(history)
    write_checked(catalog, path)
    history.write(target)
    return HistoryImport(catalog=catalog, path=path, history=history, history_path=target, days=len(wanted))


def update_from_aws(
    region: str, days: int, *, name: str, progress: Progress | None = None, **options: Any
) -> PriceHistory:
    """Read the spot prices of the last days and add them to the history of a catalogue."""
    found = fetch_history(region, days, progress=progress, **options)
    if not found:
        raise UsageError(f"AWS has no spot prices of the last {days} days in {region}: check the region's name")
    rows: Iterable[Row] = (("aws", type_, zone, "spot", day.toordinal(), usd) for type_, zone, day, usd in found)
    ordinals = [day.toordinal() for _, _, day, _ in found]
    history = PriceHistory.of(rows, seen=range(min(ordinals), max(ordinals) + 1))
    target = history_path(name)
    if target.is_file():
        history = PriceHistory.read(target).merged(history)
    history.write(target)
    return history


def load_as_of(name: str, day: date) -> Catalog:
    """Load a catalogue with the prices of a past day, from its history."""
    return as_of(library.load(name), load_history(name), day)


def load_dated(text: str) -> Catalog:
    """Load ``NAME``, a file, or ``NAME@2026-08-01``: a catalogue as it was on a day."""
    match = _DATED.fullmatch(text)
    return library.load(text) if match is None else load_as_of(match[1], _day(match[2]))


def diff(before: str, after: str) -> Changes:
    """Compare two catalogues, each a name, a file or ``NAME@DATE``."""
    return compare(load_dated(before), load_dated(after))


def as_of(catalog: Catalog, history: PriceHistory, day: date) -> Catalog:
    """Return the catalogue with the prices of a day. UsageError if the history begins later.

    A market without any history, such as on-demand prices beside AWS's spot prices, keeps the catalogue's own."""
    if day < history.first:
        raise UsageError(f"the price history of {catalog.name} begins on {history.first}: {day} is before it")
    place = {zone or region: i for i, (region, zone) in enumerate(catalog.places)}
    rows: dict[Market, list[tuple[int, int, float, int]]] = {}
    for key in history.changes:
        cloud, type_, where, side = key
        if cloud != catalog.provider or type_ not in catalog.index_by_name or where not in place:
            continue
        known = rows.setdefault(Market(side), [])
        price = history.at_key(key, day)
        if price is not None:
            seen = day.toordinal() - price.age_days
            known.append((catalog.index_by_name[type_], place[where], price.usd_per_h, seen))
    if not any(rows.values()):
        raise UsageError(f"the price history has no price of {catalog.name} on {day}")
    prices = {**catalog.prices, **{market: Prices.from_rows(sorted(found)) for market, found in rows.items()}}
    note = f"Prices as of {day}, from the price history."
    return replace(catalog, prices=prices, notes=(*catalog.notes, note))


def at_percentile(catalog: Catalog, history: PriceHistory | None, share: float, *, days: int = RECENT_DAYS) -> Catalog:
    """Return the catalogue with a percentile (0 to 100) of the last days' prices, up to its own newest price.

    Prices without a history in these days stay as they are; a note counts them."""
    about = f"{_percent(share)} of the prices of {days} days"
    seen = catalog.prices_seen
    if history is None or seen is None:
        note = f"{catalog.name} has no price history, so {about} is not known: its own prices are used."
        return replace(catalog, notes=(*catalog.notes, note))
    place = {zone or region: i for i, (region, zone) in enumerate(catalog.places)}
    until = max(history.first, min(seen[1], history.last))
    known: dict[Market, dict[tuple[int, int], float]] = {market: {} for market in Market}
    for key in history.changes:
        cloud, type_, where, side = key
        if cloud == catalog.provider and type_ in catalog.index_by_name and where in place:
            usd = history.percentile_of(key, share, days, until=until)
            if usd is not None:
                known[Market(side)][catalog.index_by_name[type_], place[where]] = usd
    prices, replaced = {}, 0
    for market, columns in catalog.prices.items():
        rows = zip(columns.instance.tolist(), columns.place.tolist(), strict=True)
        usd_of = np.array([known[market].get(row, np.nan) for row in rows], dtype=np.float64)
        found = np.isfinite(usd_of)
        replaced += int(found.sum())
        prices[market] = replace(columns, usd_per_hour=np.where(found, usd_of, columns.usd_per_hour))
    count = f"{replaced:,} of {catalog.offer_count:,} prices of {catalog.name}"
    note = f"{about} until {until} for {count}; the others have no history and are the catalogue's own."
    return replace(catalog, prices=prices, notes=(*catalog.notes, note))


def _percent(share: float) -> str:
    return "the median" if share == 50 else f"percentile {share:g}"


def has_history(name: str) -> bool:
    return name in histories()


def _day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise UsageError(f"{text!r} is not a day: write it like 2026-08-22") from None


class _Union:
    """The newest catalogue, with the types and places of all."""

    def __init__(self) -> None:
        self._last: Catalog | None = None
        self._instances: dict[str, Instance] = {}
        self._places: dict[Place, None] = {}

    def watch(self, dated: Iterable[tuple[date, Catalog]]) -> Iterator[tuple[date, Catalog]]:
        for day, catalog in dated:
            self._instances |= {instance.name: instance for instance in catalog.instances}
            self._places |= dict.fromkeys(catalog.places)
            self._last = catalog
            yield day, catalog

    def newest(self) -> Catalog:
        last = self._last
        if last is None:
            raise UsageError("no catalogue was read")
        instances, places = tuple(self._instances.values()), tuple(self._places)
        index = {instance.name: i for i, instance in enumerate(instances)}
        at = {place: i for i, place in enumerate(places)}
        new_instance = np.array([index[instance.name] for instance in last.instances], np.int32)
        new_place = np.array([at[place] for place in last.places], np.int32)
        prices = {
            market: replace(columns, instance=new_instance[columns.instance], place=new_place[columns.place])
            for market, columns in last.prices.items()
        }
        return replace(last, instances=instances, places=places, prices=prices)
