"""Traces of spot capacity: JSON files in, machines up at every tick of one zone out. market.py puts zones together.

Public traces share one JSON form and mean opposite things by it: some count the machines that are up, others write 1
for "preempted". A loader has to be given the meaning; the data do not show it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from enum import Enum
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from deepvm import strict_json as strict
from deepvm.catalog.model import MOST_USD
from deepvm.errors import MalformedFile, UsageError

Floats = NDArray[np.float64]
Counts = NDArray[np.int32]
Meaning = Literal["up", "preempted"]
MOST_BYTES = 256 * 2**20
MOST_MACHINES = 100_000
_HINT = 'a trace has {"metadata": {"gap_seconds": 600}, "data": [machines by tick]}'
MOST_FILLED_S = 3600.0  # a longer gap in the data is refused
_FILE = re.compile(r"(?P<zone>[A-Za-z0-9-]+)_(?P<accelerator>[A-Za-z0-9.-]+?)(?:_(?P<count>\d+))?\Z")


class TraceKind(str, Enum):
    """``LAUNCH``: how many machines a launch would get. ``HELD``: how many of the machines held are still up."""

    LAUNCH = "launch"
    HELD = "held"


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One zone: ``up[t]`` of ``machines`` machines are up during tick t, which lasts ``gap_s``."""

    zone: str
    machines: int
    gap_s: float
    up: Counts
    kind: TraceKind
    start: datetime | None = None  # of the first tick
    prices: Floats | None = None  # USD an hour of one machine, by tick; NaN where unknown
    first_s: float = 0.0  # from the beginning of the recording, of which this may be a later part
    accelerator: str | None = None
    accelerator_count: int = 1

    def __post_init__(self) -> None:
        if not self.up.size:
            raise UsageError(f"the trace of {self.zone} is empty")
        if not (np.isfinite(self.gap_s) and self.gap_s > 0):
            raise UsageError(f"the trace of {self.zone} has ticks of {self.gap_s:g} s: they must be above zero")
        if self.up.min() < 0 or self.up.max() > self.machines:
            raise UsageError(
                f"the trace of {self.zone} has {self.up.min()} to {self.up.max()} machines up: "
                f"it must be from 0 to {self.machines}"
            )
        if self.prices is not None:
            if len(self.prices) != len(self.up):
                raise UsageError(f"the trace of {self.zone} has {len(self.up)} ticks and {len(self.prices)} prices")
            if (self.prices < 0).any():
                raise UsageError(f"the trace of {self.zone} has a negative price")

    @property
    def hours(self) -> float:
        return len(self.up) * self.gap_s / 3600

    @property
    def region(self) -> str:
        return region_of(self.zone)


def region_of(zone: str) -> str:
    """Return a zone's region: us-east-1 for us-east-1c, us-central1 for us-central1-a, use1 for use1-az4, eastus for
    eastus/2."""
    if match := re.fullmatch(r"(.+)/\d+", zone):
        return match[1]
    if match := re.fullmatch(r"([a-z]+\d+)-az\d+", zone):
        return match[1]
    if match := re.fullmatch(r"([a-z]+-[a-z]+-\d+)[a-z]", zone):
        return match[1]
    if match := re.fullmatch(r"([a-z]+-[a-z]+\d+)-[a-z]", zone):
        return match[1]
    return zone


def load_trace(path: Path, *, meaning: Meaning, kind: TraceKind | None = None, machines: int | None = None) -> Trace:
    """Read one trace. Its kind and size come from its folders (``availability/16-node/...``) unless they are given."""
    check_meaning(meaning)
    return _checked(strict.read_file(path, most_bytes=MOST_BYTES, hint=_HINT), path, meaning, kind, machines)


def _checked(
    document: Any, path: Path, meaning: Meaning, kind: TraceKind | None = None, machines: int | None = None
) -> Trace:
    try:
        return _trace_of(document, path, meaning, kind or _kind_of(path), machines or _machines_of(path))
    except (strict.MalformedJson, UsageError) as error:
        raise MalformedFile(path, f"not a valid trace: {error}") from None


def load_traces(folder: Path, *, meaning: str | None) -> dict[str, tuple[Trace, ...]]:
    """Read every trace below a folder: by the folder that each lies in, which makes one market.

    Hidden files and JSON files without ``metadata`` and ``data`` are no traces, and are passed over."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder of traces")
    checked = check_meaning(meaning)
    found: dict[str, list[Trace]] = {}
    for path in sorted(folder.rglob("*.json")):
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts):
            document = strict.read_file(path, most_bytes=MOST_BYTES, hint=_HINT)
            if isinstance(document, dict) and {"metadata", "data"} & set(document):
                name = path.parent.relative_to(folder).as_posix()
                name = path.resolve().parent.name if name == "." else name
                found.setdefault(name, []).append(_checked(document, path, checked))
    if not found:
        raise UsageError(f"{folder} has no trace: {_HINT}, in one JSON file for each zone")
    return {name: tuple(traces) for name, traces in found.items()}


def check_meaning(meaning: str | None) -> Meaning:
    """Return the meaning, if it is one. It is never guessed."""
    if meaning not in get_args(Meaning):
        found = "not given" if meaning is None else repr(meaning)
        raise UsageError(
            f"the meaning of the traces is {found}: write --meaning up if they count machines that are up, "
            "--meaning preempted if 1 means preempted"
        )
    return cast(Meaning, meaning)


def _trace_of(document: Any, path: Path, meaning: Meaning, kind: TraceKind, machines: int | None) -> Trace:
    table = strict.table(document, "the document")
    metadata = strict.table(strict.member(table, "metadata"), "metadata")
    gap_s = strict.number(strict.member(metadata, "gap_seconds"), "gap_seconds", 1e-3, 1e7)
    counts = _column(strict.member(table, "data"), "data", MOST_MACHINES)
    known = counts[np.isfinite(counts)]
    if not known.size or (known != np.floor(known)).any():
        raise strict.MalformedJson(f"data has values that are not whole numbers from 0 to {MOST_MACHINES}")
    most = int(machines or max(1, known.max()))
    if known.max() > most:
        raise strict.MalformedJson(f"data has {known.max():.0f}, and its folder is of {most} machines")
    up = _filled(counts if meaning == "up" else most - counts, gap_s)
    ticks = metadata.get("tick_offset")
    offset = timedelta(seconds=gap_s * (0 if ticks is None else strict.integer(ticks, "tick_offset", 0, 10**8)))
    prices = None if table.get("prices") is None else _column(table["prices"], "prices", MOST_USD)
    if prices is not None and not np.isfinite(prices).any():
        prices = None
    named = _FILE.fullmatch(path.stem)
    return Trace(
        zone=named["zone"] if named else path.stem,
        machines=most,
        gap_s=gap_s,
        up=up,
        kind=kind,
        start=None if metadata.get("start_time") is None else _moment(metadata["start_time"]) + offset,
        first_s=offset.total_seconds(),
        prices=prices,
        accelerator=named["accelerator"].upper() if named else None,
        accelerator_count=int(named["count"] or 1) if named else 1,
    )


def _column(values: Any, what: str, most: float) -> Floats:
    rows = strict.numbers(values, what, 0, most, missing=True)
    if not rows:
        raise strict.MalformedJson(f"{what} is empty")
    return np.array([np.nan if row is None else row for row in rows], dtype=np.float64)


def _filled(up: Floats, gap_s: float) -> Counts:
    """Fill short gaps with the fewer of the machines before and after. Long ones are refused."""
    missing = np.isnan(up)
    if missing.any():
        ticks, at = len(up), np.arange(len(up))
        before = np.maximum.accumulate(np.where(missing, -1, at))
        after = np.minimum.accumulate(np.where(missing, ticks, at)[::-1])[::-1]
        longest = int((after - before)[missing].max()) - 1
        if longest * gap_s > MOST_FILLED_S:
            first = int(np.flatnonzero(missing & ((after - before) - 1 == longest))[0])
            raise strict.MalformedJson(
                f"data has a gap (null) of {longest * gap_s / 3600:.1f} h from entry {first}: cut the trace there"
            )
        known = np.concatenate([up, [np.inf]])  # -1 and ``ticks`` are outside of the data
        up = np.where(missing, np.minimum(known[before], known[after]), up)
    return up.astype(np.int32)


def _moment(value: Any) -> datetime:
    text = strict.text(value, "start_time", 40)
    try:
        moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        raise strict.MalformedJson(f"start_time is {strict.brief(text)}, not an ISO date and time") from None
    return moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)


def _folders(path: Path) -> list[str]:
    """Return the names of the three nearest folders: a set, a number of machines, a kind."""
    return [folder.name for folder in path.resolve().parents][:3]


def _kind_of(path: Path) -> TraceKind:
    return TraceKind.HELD if "preemption" in _folders(path) else TraceKind.LAUNCH


def _machines_of(path: Path) -> int | None:
    for part in _folders(path):
        if match := re.fullmatch(r"(\d+)-node", part):
            return int(match[1])
    return None
