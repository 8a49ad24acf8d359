"""The spot markets of a board's machine types: catalogue prices with drawn or recorded capacity in, markets out.

Capacity is drawn by accelerator and region: neither prices nor the other places of a request change what is drawn.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import combinations, groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepvm.errors import UsageError
from deepvm.json_fields import json_fields
from deepvm.market.builtin import SHARED, HazardClass, History, builtin_history, classes_of
from deepvm.market.hazard.drawing import Region, draw
from deepvm.market.hazard.hidden import HiddenBulk
from deepvm.market.market import Market
from deepvm.market.trace import Trace
from deepvm.plan.risk.recorded import Recorded, recorded_markets
from deepvm.plan.search.board import Board

Capacity = NDArray[np.int32]
ZONES_OF_A_REGION = 3  # assumed where a catalogue prices regions, not zones: AWS and Google have at least these
MOST_ZONES = 9
DRAWN_MACHINES = 16  # in a zone; larger gangs scale it up
DAYS = 8.0
WORLDS = 8  # independent draws, one after the other: how tight a zone is differs between them
_MOST_COLUMNS = 1200  # zones × worlds in one draw


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """What a drawn market depends on: an accelerator, the region of every zone that is drawn, a seed."""

    accelerator: str | None
    regions: tuple[str, ...]
    seed: int
    worlds: int

    @property
    def tick_s(self) -> float:
        return classes_of(self.accelerator)[0].model.tick_s

    def capacity(self, zones: Sequence[int]) -> Capacity:
        """Return [zone, tick], of at most ``DRAWN_MACHINES``."""
        return _draw(classes_of(self.accelerator), self.regions, self.seed, self.worlds)[list(zones)]

    def to_json(self) -> dict[str, Any]:
        regions = [[name, len(list(zones))] for name, zones in groupby(self.regions)]
        return {**json_fields(self, "accelerator seed worlds"), "regions": regions}


@dataclass(frozen=True, kw_only=True)
class Column:
    """One zone of a type's market: a row of the board's workers."""

    row: int
    drawn: int  # its number in a draw
    region: str
    zone: str | None
    name: str  # unique
    usd: float  # spot, an hour
    on_demand_usd: float  # inf if it is not offered

    def to_json(self) -> dict[str, Any]:
        usd = self.on_demand_usd if np.isfinite(self.on_demand_usd) else None
        return {**json_fields(self, "name region zone drawn usd"), "on_demand_usd": usd}


@dataclass(frozen=True, kw_only=True, eq=False)
class TypeMarket:
    """The zones that offer one machine type, the cheapest first, and how its machines come and go there."""

    instance: int
    columns: tuple[Column, ...]
    capacity: Capacity  # [column, tick], of at most ``machines``
    machines: int
    tick_s: float
    history: History
    draw: Draw  # of its built-in market, even if traces replace that
    traces: str | None = None  # their name
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"zones": [column.to_json() for column in self.columns], **json_fields(self, "draw traces")}

    @property
    def hours(self) -> float:
        return float(self.capacity.shape[1] * self.tick_s / 3600)

    @property
    def on_demand_usd(self) -> float | None:
        """An hour of one on-demand machine where spot ones are cheapest, as runs read it from a plan's instances; None
        if it is not offered."""
        usd = min((column.usd, column.on_demand_usd) for column in self.columns)[1]
        return usd if np.isfinite(usd) else None

    def gangs(self, machines: int) -> Capacity:
        """Return the capacity for a gang of this size. A zone is as deep as the gang is large."""
        return self.capacity if machines <= self.machines else self.capacity * machines // self.machines

    def market(self, machines: int, columns: Sequence[int], hours: float) -> Market:
        """Return these zones for a gang, repeated until they last this number of hours."""
        chosen = list(columns)
        ticks = max(1, int(np.ceil(hours * 3600 / self.tick_s)))
        capacity = self.gangs(machines)[chosen][:, np.arange(ticks) % self.capacity.shape[1]]
        usd = np.array([self.columns[c].usd for c in chosen])
        return Market(
            zones=tuple(self.columns[c].name for c in chosen),
            tick_s=self.tick_s,
            capacity=capacity,
            price=np.broadcast_to(usd[:, None], capacity.shape),
            on_demand_usd=np.array([self.columns[c].on_demand_usd for c in chosen]),
            priced=False,
        )

    def always_up(self) -> TypeMarket:
        """Return the same prices without preemption."""
        return replace(self, capacity=np.full((len(self.columns), 1), self.machines, np.int32), notes=())

    @classmethod
    def of(
        cls, *, instance: int, columns: tuple[Column, ...], draw: Draw, recorded: Recorded | None = None
    ) -> TypeMarket:
        """Return these zones with drawn capacity, or those of them that have a trace with recorded capacity."""
        if recorded is None:
            return cls(
                instance=instance,
                columns=columns,
                capacity=draw.capacity([column.drawn for column in columns]),
                machines=DRAWN_MACHINES,
                tick_s=draw.tick_s,
                history=builtin_history(draw.accelerator),
                draw=draw,
            )
        kept, capacity = recorded.placed(columns)
        return cls(
            instance=instance, columns=tuple(kept), capacity=capacity, machines=recorded.machines,
            tick_s=recorded.tick_s, history=recorded.history, draw=draw, traces=recorded.name,
            notes=recorded.notes(columns),
        )  # fmt: skip

    @cached_property
    def zone_sets(self) -> tuple[tuple[int, ...], ...]:
        """The sets of zones to train in that a plan tries first: one zone, regions and each choice of some, and all."""
        columns = self.columns
        regions = list(dict.fromkeys(column.region for column in columns))
        whole = [tuple(i for i, column in enumerate(columns) if column.region == region) for region in regions]
        sets = [zones[:1] for zones in whole[:3] if columns[zones[0]].zone is not None]
        for count in range(1, min(3, len(whole)) + 1):
            sets += [tuple(sorted(sum(some, ()))) for some in combinations(whole[:3], count)]
        sets += [tuple(range(min(3, len(columns)))), tuple(range(len(columns)))]
        return tuple(dict.fromkeys(sets))


@dataclass(frozen=True, kw_only=True)
class Spot:
    """The markets of all machine types of one board."""

    board: Board
    seed: int
    worlds: int = WORLDS
    recorded: Mapping[str, Recorded]  # by the catalogue's name of the accelerator

    @classmethod
    def of(cls, board: Board, traces: Mapping[str, Sequence[Trace]] | None) -> Spot:
        return cls(
            board=board,
            seed=board.request.seed,
            recorded={} if traces is None else recorded_markets(_accelerators(board), traces),
        )

    def afresh(self, worlds: int) -> Spot:
        """Return other draws of the same laws, to judge what was chosen by the first ones. Records stay."""
        return Spot(board=self.board, seed=self.seed + 1, worlds=worlds, recorded=self.recorded)

    def of_type(self, instance: int) -> TypeMarket | None:
        """Return the market of a machine type; None if it has no spot offer."""
        columns = self._columns(instance)
        if not columns:
            return None
        accelerator = self.board.catalog.instances[instance].accelerator
        recorded = self.recorded.get(accelerator or "")
        draw = self._draw_of(accelerator)
        return TypeMarket.of(instance=instance, columns=tuple(columns), draw=draw, recorded=recorded)

    def _columns(self, instance: int) -> list[Column]:
        workers, places = self.board.workers, self.board.catalog.places
        rows = np.flatnonzero((workers.instance == instance) & np.isfinite(workers.spot_usd))
        rows = rows[np.argsort(workers.spot_usd[rows], kind="stable")]
        at, found = self._numbers, []
        for row in rows.tolist():
            region, zone = places[workers.place[row]]
            found += [
                Column(
                    row=row, drawn=at[name], region=region, zone=zone, name=name, usd=float(workers.spot_usd[row]),
                    on_demand_usd=float(workers.on_demand_usd[row]),
                )
                for name in _zones_of(region, zone)
            ]  # fmt: skip
            if len(found) >= MOST_ZONES:
                break
        return found[:MOST_ZONES]

    @cached_property
    def _numbers(self) -> dict[str, int]:
        names = [name for region, zone in self.board.catalog.places for name in _zones_of(region, zone)]
        return {name: i for i, name in enumerate(names)}

    def _draw_of(self, accelerator: str | None) -> Draw:
        """Return the draw of every place of the catalogue."""
        places = self.board.catalog.places
        regions = tuple(region for region, zone in places for _ in _zones_of(region, zone))
        worlds = min(self.worlds, most_worlds(len(regions)))
        return Draw(accelerator=accelerator, regions=regions, seed=self.seed, worlds=worlds)


def most_worlds(zones: int) -> int:
    return max(1, _MOST_COLUMNS // zones)


def _accelerators(board: Board) -> list[str]:
    return [board.catalog.instances[i].accelerator or "" for i in np.unique(board.workers.instance).tolist()]


def _zones_of(region: str, zone: str | None) -> list[str]:
    return [zone] if zone is not None else [f"{region}/{i + 1}" for i in range(ZONES_OF_A_REGION)]


@lru_cache(maxsize=16)
def _draw(classes: tuple[HazardClass, ...], regions: tuple[str, ...], seed: int, worlds: int) -> Capacity:
    """Draw worlds side by side, and lay them one after the other. In each, every zone has a tightness of its own.

    A region's draws depend on the seed and on its zones alone."""
    tick_s = {row.model.tick_s for row in classes}
    if len(tick_s) > 1:
        raise UsageError(f"the built-in hazards of one accelerator have ticks of {sorted(tick_s)} s: fit them alike")
    seen = np.array([row.history.zones for row in classes], dtype=np.float64)
    ticks = round(DAYS * 86400 / tick_s.pop())
    places = {region: [i for i, name in enumerate(regions) if name == region] for region in dict.fromkeys(regions)}
    models, drawn, groups = list[HiddenBulk](), list[Region](), list[int]()
    for number, (region, at) in enumerate(places.items()):
        chance = np.random.default_rng([seed, zlib.crc32(region.encode())])
        tightness = chance.choice(len(classes), size=worlds * len(at), p=seen / seen.sum())
        models += [classes[i].model for i in tightness]
        drawn.append(Region(chance=chance, zones=worlds * len(at), groups=worlds))
        groups += [number * worlds + world for world in range(worlds) for _ in at]
    capacity = draw(drawn, models, machines=DRAWN_MACHINES, ticks=ticks, groups=groups, shared=SHARED)
    laid, first = np.empty((len(regions), worlds * ticks), np.int32), 0
    for at in places.values():
        rows = capacity[first : first + worlds * len(at)].reshape(worlds, len(at), ticks)
        laid[at] = rows.swapaxes(0, 1).reshape(len(at), worlds * ticks)
        first += worlds * len(at)
    return laid
