"""Prices over time: CSV files or dated catalogues in; the price, its age and its percentiles on any day out.

A file has the columns ``cloud,type,place,market,date,usd_per_h`` and a row for each change; an empty price means that
the type was no longer offered. A first line ``#seen=2026-08-01 2026-08-02`` lists the days on which prices were looked
up; without it, these are the days of the rows.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import os
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deepvm import strict_json as strict
from deepvm.catalog.model import LEAST_USD, MOST_USD, Catalog
from deepvm.catalog.model import Market as Side
from deepvm.errors import MalformedFile, UnknownName, UsageError
from deepvm.market.trace import region_of

Floats = NDArray[np.float64]
Days = NDArray[np.int32]
Key = tuple[str, str, str, str]  # cloud, type, place, market
Row = tuple[str, str, str, str, int, float]  # cloud, type, place, market, day, USD an hour or NaN
COLUMNS = ["cloud", "type", "place", "market", "date", "usd_per_h"]
MOST_BYTES = 1 << 30
_MARKETS = {"spot": "spot", "ondemand": "on-demand", "on-demand": "on-demand"}
_SEEN = "#seen="


@dataclass(frozen=True, kw_only=True, slots=True)
class PriceAt:
    """A price on a day. ``age_days`` is the time since prices were last looked up, ``since`` the day of the change."""

    usd_per_h: float
    since: date
    age_days: int


@dataclass(frozen=True, kw_only=True)
class PriceHistory:
    """Changes of prices by key: days as ordinals, rising, and dollars; NaN where a type is not offered."""

    changes: Mapping[Key, tuple[Days, Floats]]
    seen: Days  # days on which prices were looked up, rising

    @classmethod
    def of(cls, rows: Iterable[Row], *, seen: Iterable[int] = ()) -> PriceHistory:
        """Keep the changes among rows of any order. UsageError if a day has two prices."""
        found: dict[Key, list[tuple[int, float]]] = {}
        for cloud, type_, place, market, day, usd in rows:
            found.setdefault((cloud, type_, place, market), []).append((day, usd))
        days = sorted(set(seen) or {day for entries in found.values() for day, _ in entries})
        return cls(changes={key: _changes(key, found[key]) for key in found}, seen=np.array(days, np.int32))

    @classmethod
    def read(cls, path: Path) -> PriceHistory:
        """Read a CSV file, packed by gzip or not."""
        text = _text(path)
        seen: list[int] = []
        lines = io.StringIO(text)
        skipped = 0
        if text.startswith(_SEEN):
            words, skipped = lines.readline()[len(_SEEN) :].split(), 1
            try:
                seen = [date.fromisoformat(word).toordinal() for word in words]
            except ValueError as error:
                raise MalformedFile(path, f"has a day that is not valid ({error})", line=1) from None
        try:
            return cls.of(_rows(lines, path, skipped), seen=seen)
        except MalformedFile:
            raise
        except UsageError as error:
            raise MalformedFile(path, str(error)) from None

    @classmethod
    def from_catalogs(cls, dated: Iterable[tuple[date, Catalog]]) -> PriceHistory:
        """Compare catalogues of several days, oldest first. An offer that is missing in a later one ended."""
        rows: list[Row] = []
        offered: dict[Key, float] = {}
        seen: list[int] = []
        for day, catalog in dated:
            if seen and day.toordinal() <= seen[-1]:
                raise UsageError(f"the catalogue of {day} does not follow that of {date.fromordinal(seen[-1])}")
            seen.append(day.toordinal())
            now = dict(_offers(catalog))
            rows += [(*key, seen[-1], usd) for key, usd in now.items() if offered.get(key) != usd]
            rows += [(*key, seen[-1], math.nan) for key in offered if key not in now]
            offered = now
        return cls.of(rows, seen=seen)

    def merged(self, later: PriceHistory) -> PriceHistory:
        """Add another history. Where both have a price of a day, the later one's counts."""
        changes = dict(self.changes)
        for key, (days, usd) in later.changes.items():
            both = dict(zip(*(column.tolist() for column in changes.get(key, (days, usd))), strict=True))
            both |= zip(days.tolist(), usd.tolist(), strict=True)
            changes[key] = _changes(key, list(both.items()))
        return PriceHistory(changes=changes, seen=np.union1d(self.seen, later.seen).astype(np.int32))

    def write(self, path: Path) -> None:
        """Replace a file, completely or not at all. The same history gives the same bytes."""
        text = io.StringIO()
        text.write(_SEEN + " ".join(date.fromordinal(day).isoformat() for day in self.seen.tolist()) + "\n")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        for key in sorted(self.changes):
            for day, usd in zip(*(column.tolist() for column in self.changes[key]), strict=True):
                writer.writerow([*key, date.fromordinal(day).isoformat(), "" if math.isnan(usd) else repr(usd)])
        content = text.getvalue().encode()
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)

    @property
    def first(self) -> date:
        return self._day(0)

    @property
    def last(self) -> date:
        return self._day(-1)

    def _day(self, at: int) -> date:
        if not self.seen.size:
            raise UsageError("the price history is empty")
        return date.fromordinal(int(self.seen[at]))

    @cached_property
    def _by_type(self) -> Mapping[str, tuple[Key, ...]]:
        found: dict[str, list[Key]] = {}
        for key in self.changes:
            found.setdefault(key[1], []).append(key)
        return {name: tuple(sorted(keys)) for name, keys in found.items()}

    def keys(self, type_: str, *, market: str | None = None) -> tuple[Key, ...]:
        """Return the keys of a type, in every place. UnknownName if it has none."""
        if type_ not in self._by_type:
            raise UnknownName("machine type of this history", type_, self._by_type)
        return self.keys_of(type_, market)

    def keys_of(self, type_: str, market: str | None = None) -> tuple[Key, ...]:
        """Return the keys of a type, in every place; none if it is unknown."""
        return tuple(key for key in self._by_type.get(type_, ()) if market is None or key[3] == _side(market))

    def key(self, type_: str, place: str, market: str) -> Key | None:
        """Find the key of a zone, or else of its region; None if there is no price."""
        keys = {key[2]: key for key in self._by_type.get(type_, ()) if key[3] == _side(market)}
        return keys.get(place) or keys.get(region_of(place))

    def at(self, type_: str, place: str, market: str, day: date) -> PriceAt | None:
        """Return the price on a day; None if the type was not offered there, or not yet looked up."""
        key = self.key(type_, place, market)
        return None if key is None else self.at_key(key, day)

    def at_key(self, key: Key, day: date) -> PriceAt | None:
        days, usd = self.changes[key]
        at = int(np.searchsorted(days, day.toordinal(), side="right")) - 1
        if at < 0 or math.isnan(usd[at]):
            return None
        seen = int(self.seen[np.searchsorted(self.seen, day.toordinal(), side="right") - 1])
        age = day.toordinal() - max(seen, int(days[at]))
        return PriceAt(usd_per_h=float(usd[at]), since=date.fromordinal(int(days[at])), age_days=age)

    def daily(self, key: Key, first: date, last: date) -> Floats:
        """Return the price of each day from first to last; NaN where it is not offered or not known."""
        days, usd = self.changes[key]
        at = np.searchsorted(days, np.arange(first.toordinal(), last.toordinal() + 1), side="right") - 1
        return np.where(at >= 0, usd[np.maximum(at, 0)], np.nan)

    def percentile(
        self, share: float, days: int, type_: str, place: str, market: str, *, until: date | None = None
    ) -> float | None:
        """Return a percentile (0 to 100) of the last days' prices, each day counting once; None without a price."""
        key = self.key(type_, place, market)
        return None if key is None else self.percentile_of(key, share, days, until=until)

    def percentile_of(self, key: Key, share: float, days: int, *, until: date | None = None) -> float | None:
        if not 0 <= share <= 100 or days < 1:
            raise UsageError(f"percentile {share:g} of {days} days: it must be 0 to 100 of at least one day")
        last = (until or self.last).toordinal()
        first = max(1, last - days + 1)
        changed, usd = self.changes[key]
        begin, end = np.searchsorted(changed, (first, last), side="right")
        if begin == end > 0 and math.isfinite(usd[begin - 1]):  # no change in these days, as most types have none
            return float(usd[begin - 1])
        prices = self.daily(key, date.fromordinal(first), date.fromordinal(last))
        known = prices[np.isfinite(prices)]
        return float(np.percentile(known, share)) if known.size else None


def _side(market: str) -> str:
    if market not in _MARKETS:
        raise UnknownName("market", market, ("spot", "on-demand"))
    return _MARKETS[market]


def _changes(key: Key, entries: list[tuple[int, float]]) -> tuple[Days, Floats]:
    table = np.array(entries, dtype=np.float64)
    table = table[np.argsort(table[:, 0], kind="stable")]
    days, usd = table[:, 0].astype(np.int32), table[:, 1]
    same = (usd[1:] == usd[:-1]) | (np.isnan(usd[1:]) & np.isnan(usd[:-1]))
    if ((days[1:] == days[:-1]) & ~same).any():
        twice = date.fromordinal(int(days[:-1][(days[1:] == days[:-1]) & ~same][0]))
        raise UsageError(f"{key[1]} in {key[2]} ({key[3]}) has two prices on {twice}")
    kept = np.concatenate([[True], ~same])
    return days[kept], usd[kept]


def _offers(catalog: Catalog) -> Iterator[tuple[Key, float]]:
    places = [zone or region for region, zone in catalog.places]
    names = [instance.name for instance in catalog.instances]
    for side, prices in catalog.prices.items():
        market = "spot" if side is Side.SPOT else "on-demand"
        columns = (prices.instance.tolist(), prices.place.tolist(), prices.usd_per_hour.tolist())
        for instance, place, usd in zip(*columns, strict=True):
            yield (catalog.provider, names[instance], places[place], market), usd


def _text(path: Path) -> str:
    try:
        raw = strict.read_bytes(path, most_bytes=MOST_BYTES, hint="split it")
        if raw[:2] == b"\x1f\x8b":
            with gzip.open(io.BytesIO(raw)) as file:
                raw = file.read(MOST_BYTES + 1)
        if len(raw) > MOST_BYTES:
            raise MalformedFile(path, f"has more than {MOST_BYTES:,} bytes: split it")
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise MalformedFile(path, "is not UTF-8 text, a price history is CSV") from None
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise MalformedFile(path, "is a damaged gzip file") from None
    except OSError as error:
        raise MalformedFile(path, f"cannot be read ({error.strerror or error})") from None


def _rows(lines: Iterable[str], path: Path, skipped: int) -> Iterator[Row]:
    reader = csv.reader(lines, strict=True)
    days: dict[str, int] = {}
    try:
        header = next(reader, [])
        if header != COLUMNS:
            raise MalformedFile(path, f"is not a price history: the first line must be {','.join(COLUMNS)}", line=1)
        for row in reader:
            try:
                cloud, type_, place, side, day, usd = row
                market = _MARKETS[side]
                if (ordinal := days.get(day)) is None:
                    ordinal = days[day] = date.fromisoformat(day).toordinal()
                price = float(usd) if usd else math.nan
            except (ValueError, KeyError):
                raise MalformedFile(path, _problem(row), line=reader.line_num + skipped) from None
            if (usd and not LEAST_USD <= price <= MOST_USD) or not (cloud and type_ and place):
                raise MalformedFile(path, _problem(row), line=reader.line_num + skipped)
            yield cloud, type_, place, market, ordinal, price
    except csv.Error as error:
        raise MalformedFile(path, f"is not valid CSV ({error})", line=reader.line_num + skipped) from None


def _problem(row: list[str]) -> str:
    if len(row) != len(COLUMNS):
        return f"has {len(row)} columns, a price history has {len(COLUMNS)}"
    named = dict(zip(COLUMNS, row, strict=True))
    if named["market"] not in _MARKETS:
        return f"market is {named['market'][:40]!r}, not spot or ondemand"
    if not all(named[name] for name in ("cloud", "type", "place")):
        return "cloud, type or place is empty"
    try:
        date.fromisoformat(named["date"])
    except ValueError:
        return f"date is {named['date'][:40]!r}, not a day like 2026-08-22"
    return f"usd_per_h is {named['usd_per_h'][:40]!r}, not a price from {LEAST_USD:g} to {MOST_USD:g}, or empty"
