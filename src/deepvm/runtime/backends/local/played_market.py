"""Recorded markets, played on this host: machines are refused and taken as their traces say, at a multiple of the pace.

``--preempt market:PATH:meaning=up:speed=600`` plays a trace, or a folder with the traces of one market: of the workers'
type, or of ``instance=NAME``. It begins with the run's first request, and stays as in its last tick when it is over.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deepvm.errors import UsageError
from deepvm.market.market import Market, market_of
from deepvm.market.trace import check_meaning, load_trace, load_traces, region_of
from deepvm.runtime.backends.base import Backend, Change, NoCapacity
from deepvm.runtime.cluster import Machine
from deepvm.units import parse_seconds

KIND = "market:"
_LIKE = "market:FOLDER:meaning=up:speed=600"
_MOST_SPEED = 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """What a rule says; times of the market pass ``speed`` times as fast as the run's."""

    path: Path
    meaning: str | None
    instance: str | None = None  # None: the first machine's on spot
    speed: float = 1.0
    from_s: float = 0.0  # of the market, where it begins
    notice_s: float = 0.0


def split_rules(text: str) -> tuple[list[Played], str]:
    """Return the markets that ``--preempt`` plays, and its other rules."""
    rules = [rule.strip() for rule in text.split(",")]
    rest = ",".join(rule for rule in rules if not rule.startswith(KIND))
    return [_parse_rule(rule) for rule in rules if rule.startswith(KIND)], rest


def _parse_rule(rule: str) -> Played:
    path, *settings = rule.removeprefix(KIND).split(":")
    found = dict(setting.partition("=")[::2] for setting in settings)
    unknown = [name for name in found if name not in ("meaning", "instance", "speed", "from", "notice")]
    if not path or unknown or len(found) < len(settings):
        what = f"{unknown[0]!r} is unknown" if unknown else "the path is missing, or a setting is there twice"
        raise UsageError(f"--preempt {rule!r}: {what}: write it like {_LIKE}:from=3h:notice=2s")
    try:
        speed = float(found.get("speed", "1"))
    except ValueError:
        speed = 0.0
    if not 0 < speed <= _MOST_SPEED:
        raise UsageError(
            f"--preempt {rule!r}: speed is {found['speed']!r}: it must be above 0, at most {_MOST_SPEED:g}"
        )
    return Played(
        path=Path(path),
        meaning=check_meaning(found.get("meaning")),
        instance=found.get("instance"),
        speed=speed,
        from_s=parse_seconds(found.get("from", "0s")),
        notice_s=parse_seconds(found.get("notice", "0s")),
    )


def load_markets(rules: Sequence[Played], machines: Sequence[Machine]) -> dict[str, tuple[Market, Played]]:
    """Read the markets, by type of machine. Where one has no prices, a machine costs what the plan's cost."""
    spot = next((machine for machine in machines if machine.market == "spot"), None)
    if spot is None:
        raise UsageError("no machine of this plan is on spot: a market has nothing to take")
    found: dict[str, tuple[Market, Played]] = {}
    for rule in rules:
        instance = rule.instance or spot.instance
        if instance in found:
            raise UsageError(f"--preempt plays two markets of {instance}: give one, a folder has all its zones")
        market = _load(rule, spot)
        if rule.from_s >= market.hours * 3600:
            raise UsageError(f"{rule.path} has {market.hours:g} h: from={rule.from_s:g}s is behind its end")
        found[instance] = market, rule
    return found


def _load(rule: Played, spot: Machine) -> Market:
    meaning = check_meaning(rule.meaning)
    if rule.path.is_dir():
        found = load_traces(rule.path, meaning=meaning)
        if len(found) > 1:
            raise UsageError(
                f"{rule.path} has {len(found)} markets: give the folder of one, such as {next(iter(found))}"
            )
        (traces,) = found.values()
    else:
        traces = (load_trace(rule.path, meaning=meaning),)
    on_demand = spot.on_demand_usd_per_hour
    return market_of(
        traces,
        name=rule.path.name,
        spot_usd=spot.usd_per_hour,
        on_demand_usd=spot.usd_per_hour if on_demand is None else on_demand,
    )


class PlayedMarket:
    """A backend whose spot machines come from recorded markets, and all others from ``backend``."""

    def __init__(
        self,
        backend: Backend,
        markets: Mapping[str, tuple[Market, Played]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``markets`` are by type of machine."""
        self._backend, self._markets, self._clock = backend, dict(markets), clock
        self._began_s: float | None = None
        self._held: dict[str, Machine] = {}  # spot machines that are up, in the order of their requests
        self._taken: set[str] = set()  # of these, the preempted ones

    def zones(self, instance: str) -> tuple[str, ...]:
        return self._markets[instance][0].zones if instance in self._markets else ()

    def speed(self, instance: str) -> float:
        """Return how many times as fast as the run's the clock of a type's market is."""
        return self._markets[instance][1].speed if instance in self._markets else 1.0

    def quote(self, machine: Machine) -> Machine:
        """Return a machine with the place and the price that it has now."""
        if machine.market != "spot" or machine.instance not in self._markets:
            return machine
        market, _ = self._markets[machine.instance]
        zone = self._zone_of(machine)
        usd = float(market.price[market.zones.index(zone), self._tick(machine.instance)])
        return replace(machine, zone=zone, region=region_of(zone), usd_per_hour=usd)

    def capacity(self, instance: str, zone: str) -> int:
        """Return how many machines of a type this run may have in a zone, held ones included."""
        market, _ = self._markets[instance]
        return int(market.capacity[market.zones.index(zone), self._tick(instance)])

    def up(self, machines: Sequence[Machine]) -> None:
        for machine in machines:
            if machine.market == "spot":
                self._check_capacity(machine)
                self._held[machine.name] = machine
            self._backend.up([machine])

    def _check_capacity(self, machine: Machine) -> None:
        if machine.instance not in self._markets:
            raise NoCapacity(machine, f"the played market has {', '.join(self._markets)} only")
        zone = self._zone_of(machine)
        has, held = self.capacity(machine.instance, zone), len(self._kept(machine.instance, zone))
        if held >= has:
            taken = f", and {held} of them run" if held else ""
            raise NoCapacity(machine, f"{zone} has {has} machines for this run{taken}")

    def poll(self) -> Sequence[Change]:
        for instance, (market, rule) in self._markets.items():
            for zone in market.zones:
                for name in self._kept(instance, zone)[self.capacity(instance, zone) :]:
                    self._taken.add(name)
                    with contextlib.suppress(UsageError):  # it has just ended by itself
                        self._backend.preempt(name, notice_s=rule.notice_s)
        changes = self._backend.poll()
        for change in changes:
            if change.state == "down":
                self._held.pop(change.machine, None)
                self._taken.discard(change.machine)
        return changes

    def preempt(self, name: str, *, notice_s: float) -> None:
        self._backend.preempt(name, notice_s=notice_s)

    def down(self, names: Sequence[str] | None = None, *, within_s: float = 10.0) -> None:
        self._backend.down(names, within_s=within_s)

    def _kept(self, instance: str, zone: str) -> list[str]:
        """Return the machines there that the market has not taken, first requested first."""
        return [
            name
            for name, machine in self._held.items()
            if name not in self._taken and machine.instance == instance and self._zone_of(machine) == zone
        ]

    def _zone_of(self, machine: Machine) -> str:
        """Return a machine's zone: the first of its market if that does not know it."""
        zones = self._markets[machine.instance][0].zones
        return machine.zone if machine.zone in zones else zones[0]

    def _tick(self, instance: str) -> int:
        if self._began_s is None:
            self._began_s = self._clock()
        market, rule = self._markets[instance]
        market_s = rule.from_s + (self._clock() - self._began_s) * rule.speed
        return min(int(market_s / market.tick_s), market.ticks - 1)
