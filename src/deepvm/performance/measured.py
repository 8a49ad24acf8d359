"""What every measurement carries: machine, software versions, raw samples. Job and profile files are made of it."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepvm import strict_json as strict
from deepvm.errors import UsageError
from deepvm.json_fields import json_fields

MOST_SAMPLES = 100_000
_NAME = 200  # characters


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Where something was measured. Missing data is None."""

    cpu: str
    cores: int
    memory_bytes: int | None = None
    instance: str | None = None  # the cloud's name of its type
    accelerator: str | None = None  # a name of the accelerator table
    accelerator_count: int = 0

    @property
    def title(self) -> str:
        """How tables and figures name it."""
        device = f"{self.accelerator_count} × {self.accelerator}" if self.accelerator else f"{self.cores} cores"
        return f"{self.instance} ({device})" if self.instance else device

    def to_json(self) -> dict[str, Any]:
        return json_fields(self, "cpu cores memory_bytes instance accelerator accelerator_count")

    @classmethod
    def from_json(cls, document: Any) -> Machine:
        table = strict.table(document, "machine")
        return cls(
            cpu=strict.text(strict.member(table, "cpu"), "cpu", _NAME),
            cores=strict.integer(strict.member(table, "cores"), "cores", 1, 1_000_000),
            memory_bytes=optional(strict.integer, table.get("memory_bytes"), "memory_bytes", 1, 2**60),
            instance=optional(strict.text, table.get("instance"), "instance", _NAME),
            accelerator=optional(strict.text, table.get("accelerator"), "accelerator", _NAME),
            accelerator_count=strict.integer(table.get("accelerator_count", 0), "accelerator_count", 0, 1024),
        )


@dataclass(frozen=True, slots=True)
class Samples:
    """Times of the same thing, measured several times, in seconds."""

    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.seconds or not all(math.isfinite(s) and s >= 0 for s in self.seconds):
            raise UsageError(
                f"samples need at least one time, each finite and not negative: found {self.seconds!r:.80}"
            )

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    def quantile_s(self, share: float) -> float:
        """Return the time that this share of the samples does not exceed, interpolated."""
        ordered = sorted(self.seconds)
        place = share * (len(ordered) - 1)
        low = math.floor(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

    @property
    def spread(self) -> float:
        """The width from the 5th to the 95th percentile over the median; 0 if all samples are zero."""
        return (self.quantile_s(0.95) - self.quantile_s(0.05)) / self.median_s if self.median_s else 0.0

    def to_json(self) -> dict[str, Any]:
        summary = {"median_s": self.median_s, "p5_s": self.quantile_s(0.05), "p95_s": self.quantile_s(0.95)}
        return {**summary, "samples_s": list(self.seconds)}

    @classmethod
    def from_json(cls, document: Any, what: str) -> Samples:
        rows = strict.array(strict.member(strict.table(document, what), "samples_s"), what, MOST_SAMPLES)
        if not rows:
            raise strict.MalformedJson(f"{what} has no samples")
        return cls(tuple(strict.number(row, what, 0, 1e9) for row in rows))


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """Where, when and with which software something was measured."""

    machine: Machine
    date: str  # ISO, with the time
    versions: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {**json_fields(self, "machine date"), "versions": dict(self.versions)}

    @classmethod
    def from_json(cls, document: Any) -> Provenance:
        table = strict.table(document, "provenance")
        versions = strict.table(table.get("versions", {}), "versions")
        return cls(
            machine=Machine.from_json(strict.member(table, "machine")),
            date=strict.text(strict.member(table, "date"), "date", 40),
            versions={key: strict.text(value, f"version of {key}", _NAME) for key, value in versions.items()},
        )


def optional(check: Any, value: Any, what: str, *limits: float) -> Any:
    """Check a value that may be missing."""
    return None if value is None else check(value, what, *limits)


def check_format(document: Any, wanted: str, command: str) -> Mapping[str, Any]:
    """Return the document's table if it has this format; MalformedJson otherwise, with the command that makes one."""
    found = document.get("format") if isinstance(document, dict) else None
    if found != wanted:
        what = f"its format is {strict.brief(found)}" if found else "it has no format"
        raise strict.MalformedJson(f"{what}, this deepvm reads {wanted!r}: make it again with {command}")
    return strict.table(document, "document")


def write_document(path: Path, document: Mapping[str, Any], *, private: bool = False) -> None:
    """Write a JSON file completely or not at all, for its owner only if ``private``. UsageError if it is impossible."""
    content = json.dumps(document, indent=2, allow_nan=False) + "\n"
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600 if private else 0o666)
        with open(fd, "w", encoding="utf-8") as file:
            file.write(content)
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from None
