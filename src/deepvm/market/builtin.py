"""A market without any file: an accelerator, zones and a seed in, a synthetic market and what it rests on out.

``data/hazards.json`` has figures fitted to public traces, by accelerator and tightness, with their origin and date.
``python -m benchmarks.market.fit_builtin`` makes it. An accelerator that nobody traced gets the figures of all others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import numpy as np

from deepvm.catalog import accelerators
from deepvm.errors import UnknownName, UsageError
from deepvm.json_fields import json_fields
from deepvm.market.hazard.bulk import BulkKernel
from deepvm.market.hazard.drawing import draw
from deepvm.market.hazard.hidden import HiddenBulk
from deepvm.market.hazard.hyperexponential import Hyperexponential
from deepvm.market.hazard.model import SpellPair
from deepvm.market.market import MOST_TICKS, Market
from deepvm.market.seeds import generator_of
from deepvm.market.trace import region_of
from deepvm.units import format_count

FORMAT = "deepvm-hazards/1"
TIGHTNESS = ("calm", "medium", "tight")
LEAST_DAYS, LEAST_ZONES = 7.0, 3
ANY = "any"
SHARED = 0.92  # levels of a region's zones then correlate by 0.25 to 0.77, as in traces
_MOST_MACHINES = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """What a figure of risk rests on."""

    days: float  # the longest time that any of its zones was observed
    zones: int
    origin: str
    guess: bool = False  # True if it was observed for something else

    @property
    def enough(self) -> bool:
        return self.days >= LEAST_DAYS and self.zones >= LEAST_ZONES and not self.guess

    def __str__(self) -> str:
        rests = f"{self.days:.1f} days of {format_count(self.zones, 'zone')} ({self.origin})"
        return rests if self.enough else f"not enough history: {rests}"

    def to_json(self) -> dict[str, Any]:
        return json_fields(self, "days zones origin guess enough")


def history_of(market: Market, origin: str | None = None) -> History:
    """Return what a market of traces offers as history."""
    return History(days=market.hours / 24, zones=len(market.zones), origin=origin or market.name or "traces")


@dataclass(frozen=True, kw_only=True)
class HazardClass:
    """Fitted figures of one accelerator and tightness."""

    accelerator: str
    tightness: str
    availability: float  # share of the time that a gang of ``machines`` was up
    machines: int
    model: HiddenBulk
    spells: SpellPair  # of that gang
    history: History
    fitted: str  # the day of the fit


@cache
def hazard_classes() -> tuple[HazardClass, ...]:
    """Read the built-in figures."""
    text = (resources.files("deepvm.market") / "data" / "hazards.json").read_text(encoding="utf-8")
    document = json.loads(text)
    if document.get("format") != FORMAT:
        raise UsageError(f"the built-in hazards have the format {document.get('format')!r}, not {FORMAT!r}")
    return tuple(_class(row, document["fitted"]) for row in document["classes"])


def classes_of(accelerator: str | None) -> tuple[HazardClass, ...]:
    """Return the figures for an accelerator, calm first; those of all accelerators, marked as a guess, if unknown."""
    rows = hazard_classes()
    if accelerator is not None:
        gpu = accelerators.find(accelerator)
        names = {accelerator.upper(), *(() if gpu is None else (gpu.name.upper(),))}
        if own := tuple(row for row in rows if row.accelerator.upper() in names):
            return own
    return tuple(row for row in rows if row.accelerator == ANY)


def builtin_history(accelerator: str | None) -> History:
    """Return what the built-in figures of an accelerator rest on, over all degrees of tightness."""
    rows = classes_of(accelerator)
    origins = "; ".join(dict.fromkeys(row.history.origin for row in rows))
    guess = any(row.history.guess for row in rows)
    borrowed = f"other accelerators, as there are no traces of {accelerator}: " if guess and accelerator else ""
    return History(
        days=max(row.history.days for row in rows),
        zones=sum(row.history.zones for row in rows),
        origin=borrowed + origins,
        guess=guess,
    )


def builtin_market(
    accelerator: str | None,
    zones: Sequence[str],
    *,
    seed: int,
    spot_usd: float | Mapping[str, float],
    on_demand_usd: float | Mapping[str, float],
    days: float = 30.0,
    machines: int = 16,
    tightness: str | None = None,
) -> Market:
    """Draw a market. Zones of a region rise and fall together, regions are independent.

    ``machines`` is the most that a zone ever has. Without ``tightness``, each zone draws its own, as often as it was
    observed."""
    if not zones or len(set(zones)) < len(zones):
        raise UsageError(f"a market needs zones, each once: got {', '.join(zones) or 'none'}")
    if not 1 <= machines <= _MOST_MACHINES:
        raise UsageError(f"a market of {machines} machines in a zone: it must be 1 to {_MOST_MACHINES}")
    if tightness is not None and tightness not in TIGHTNESS:
        raise UnknownName("tightness", tightness, TIGHTNESS)
    rows = classes_of(accelerator)
    chance = generator_of(seed)
    if tightness is not None:
        nearest = min(rows, key=lambda row: abs(TIGHTNESS.index(row.tightness) - TIGHTNESS.index(tightness)))
        chosen = [nearest] * len(zones)
    else:
        seen = np.array([row.history.zones for row in rows], dtype=np.float64)
        chosen = [rows[i] for i in chance.choice(len(rows), size=len(zones), p=seen / seen.sum())]
    tick_s = chosen[0].model.tick_s
    length = days * 86400 / tick_s
    if not 0.5 < length <= MOST_TICKS:
        most = MOST_TICKS * tick_s / 86400
        raise UsageError(f"a market of {days:g} days: it must be from one tick of {tick_s:g} s to {most:,.0f} days")
    ticks = round(length)
    regions = [region_of(zone) for zone in zones]
    capacity = draw(
        chance,
        [row.model for row in chosen],
        machines=machines,
        ticks=ticks,
        groups=[regions.index(region) for region in regions],
        shared=SHARED,
    )
    prices = np.array([_usd(spot_usd, zone, "spot") for zone in zones])
    return Market(
        zones=tuple(zones),
        tick_s=tick_s,
        capacity=capacity,
        price=np.repeat(prices[:, None], ticks, axis=1),
        on_demand_usd=np.array([_usd(on_demand_usd, zone, "on-demand") for zone in zones]),
        name=f"built-in {accelerator or 'market'}",
        accelerator=accelerator,
        priced=False,
    )


def _usd(given: float | Mapping[str, float], zone: str, market: str) -> float:
    usd = given.get(zone) if isinstance(given, Mapping) else given
    if usd is None:
        raise UsageError(f"no {market} price is known for {zone}: give one for each zone")
    return float(usd)


def _class(row: Mapping[str, Any], fitted: str) -> HazardClass:
    kernels = tuple(
        BulkKernel(
            drop=kernel["drop"],
            rise=kernel["rise"],
            drop_sizes=tuple(kernel["drop_sizes"]),
            rise_sizes=tuple(kernel["rise_sizes"]),
        )
        for kernel in row["kernels"]
    )
    change = tuple(tuple(line) for line in row["change"])
    laws = {
        side: Hyperexponential(weights=tuple(row[side]["weights"]), means_h=tuple(row[side]["means_h"]))
        for side in ("up", "down")
    }
    return HazardClass(
        accelerator=row["accelerator"],
        tightness=row["tightness"],
        availability=row["availability"],
        machines=row["machines"],
        model=HiddenBulk(change=change, kernels=kernels, machines=max(16, row["machines"]), tick_s=row["tick_s"]),
        spells=SpellPair(**laws),
        history=History(days=row["days"], zones=row["zones"], origin=row["origin"], guess=row["accelerator"] == ANY),
        fitted=fitted,
    )
