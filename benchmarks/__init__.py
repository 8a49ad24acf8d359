"""Measurements of what the project claims. ``python -m benchmarks [NAME ...]`` runs them and writes result tables."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One figure: the median and quartiles of its runs, and the target that it has to meet, if it has one."""

    what: str
    unit: str
    median: float
    low: float
    high: float
    runs: int
    below: float | None = None
    at_least: float | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        if self.below is not None:
            return self.median < self.below
        return None if self.at_least is None else self.median >= self.at_least

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.met}


@dataclass(frozen=True, kw_only=True)
class Table:
    """Figures side by side: the first column names the row."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Result:
    title: str
    about: str
    seed: int
    measurements: Sequence[Measurement]
    tables: Sequence[Table] = field(default=())
    notes: Sequence[str] = field(default=())
    samples: Mapping[str, Any] = field(default_factory=dict)  # every single figure, for the JSON file


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says; a benchmark takes what concerns it."""

    quick: bool = False
    rounds: int | None = None
    peers: bool = True
    only: Sequence[str] = ()
    traces: Path | None = None  # recorded markets
    meaning: str = "up"  # of what the traces count
    share: float = 0.5  # of each trace that is history


def measurement(what: str, values: Sequence[float], *, unit: str = "s", **more: Any) -> Measurement:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return Measurement(what=what, unit=unit, median=median, low=low, high=high, runs=len(values), **more)


def seconds(work: Callable[[], object], *, runs: int, warm_up: bool = True) -> list[float]:
    """Wall time of each run; the first, which fills caches, is not counted."""
    if warm_up:
        work()
    taken = []
    for _ in range(runs):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return taken
