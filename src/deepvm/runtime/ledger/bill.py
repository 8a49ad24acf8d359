"""A run's machine events -> its bill: each machine's seconds from up to down, at its price when it came up."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from deepvm.events import Event
from deepvm.runtime.cluster import Cluster

_ROLES = ("worker", "anchor", "memory")  # in the order of the bill; others follow
MOST = 1e15  # no price, duration or count of a run is larger


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleBill:
    role: str
    machines: int  # distinct names; a replacement has the name of the lost machine
    hires: int  # times that one came up
    machine_s: float
    usd: float | None  # None if a price is not known
    on_demand_usd: float | None  # the same seconds, on demand
    fallback_s: float = 0.0  # of these, on demand where the plan has spot machines
    fallback_usd: float | None = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Bill:
    roles: tuple[RoleBill, ...]
    machine_s: float
    usd: float | None
    on_demand_usd: float | None

    @property
    def saved_usd(self) -> float | None:
        return None if self.usd is None or self.on_demand_usd is None else self.on_demand_usd - self.usd

    def to_json(self) -> dict[str, Any]:
        return {
            "roles": [asdict(role) for role in self.roles],
            "machine_s": self.machine_s,
            "usd": self.usd,
            "on_demand_usd": self.on_demand_usd,
            "saved_usd": self.saved_usd,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class _Hire:
    name: str
    role: str
    up_s: float
    usd_per_hour: float | None
    on_demand_usd_per_hour: float | None
    fallback: bool = False  # on demand, where the plan has a spot machine


class Meter:
    """Observes a run's events in the ledger's order, and makes the bill."""

    def __init__(self, cluster: Cluster) -> None:
        self._planned = {machine.name: machine for machine in cluster.machines}
        self._facts: dict[str, dict[str, Any]] = {}  # of each machine, when it was requested and when it came up
        self._up: dict[str, _Hire] = {}
        self._seen_until_s: dict[str, float] = {}  # of those that were up when their session broke off
        self._ended: list[tuple[_Hire, float]] = []

    def role(self, name: str) -> str:
        role = self._facts.get(name, {}).get("role")
        if isinstance(role, str):
            return role
        planned = self._planned.get(name)
        return planned.role if planned else name.partition("/")[0]

    def observe(self, event: Event, session_until_s: float) -> None:
        """``session_until_s``: for ``run-started``, the last event's time in the session before."""
        name = event.machine
        if event.kind == "run-started":
            for up in self._up:
                self._seen_until_s.setdefault(up, session_until_s)
        elif name is not None and event.kind in ("machine-asked", "machine-up"):
            known = {key: value for key, value in event.data.items() if value is not None}
            self._facts[name] = {**self._facts.get(name, {}), **known}
            if event.kind == "machine-up":
                # If it was up already, its end is missing: it is paid until now, or until its session broke off.
                self._end(name, self._seen_until_s.get(name, event.at_s))
                self._up[name] = self._hire(name, event.at_s)
        elif name is not None and event.kind == "machine-down":
            self._end(name, event.at_s)
            self._facts.pop(name, None)  # its replacement may have a different price

    def bill(self, until_s: float) -> Bill:
        """Return the bill. A machine that is still up is paid until ``until_s``, or until its session broke off."""
        up = [(hire, self._seen_until_s.get(name, until_s)) for name, hire in self._up.items()]
        hires = [*self._ended, *up]
        named = {hire.role for hire, _ in hires}
        roles = tuple(
            _role_bill(role, [(hire, end_s) for hire, end_s in hires if hire.role == role])
            for role in (*_ROLES, *sorted(named - set(_ROLES)))
            if role in named
        )
        return Bill(
            roles=roles,
            machine_s=math.fsum(role.machine_s for role in roles),
            usd=_sum(role.usd for role in roles),
            on_demand_usd=_sum(role.on_demand_usd for role in roles),
        )

    def _end(self, name: str, at_s: float) -> None:
        hire = self._up.pop(name, None)
        self._seen_until_s.pop(name, None)
        if hire is not None:
            self._ended.append((hire, at_s))

    def _hire(self, name: str, at_s: float) -> _Hire:
        facts, planned = self._facts[name], self._planned.get(name)
        usd = number(facts.get("usd_per_hour"))
        on_demand = number(facts.get("on_demand_usd_per_hour"))
        if usd is None and planned is not None:
            usd = planned.usd_per_hour
        if on_demand is None and facts.get("market") == "on-demand":
            on_demand = usd
        same = planned is not None and facts.get("instance") in (None, planned.instance)
        if on_demand is None and planned is not None and same:
            on_demand = planned.on_demand_usd_per_hour
        return _Hire(
            name=name, role=self.role(name), up_s=at_s, usd_per_hour=usd, on_demand_usd_per_hour=on_demand,
            fallback=facts.get("market") == "on-demand" and planned is not None and planned.market == "spot",
        )  # fmt: skip


def number(value: object) -> float | None:
    """Return a number from 0 to MOST; None if the value is missing or anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value <= MOST else None


def _role_bill(role: str, hires: list[tuple[_Hire, float]]) -> RoleBill:
    seconds = [max(0.0, end_s - hire.up_s) for hire, end_s in hires]
    fallback = [(s, hire.usd_per_hour) for s, (hire, _) in zip(seconds, hires, strict=True) if hire.fallback]
    return RoleBill(
        role=role,
        machines=len({hire.name for hire, _ in hires}),
        hires=len(hires),
        machine_s=math.fsum(seconds),
        usd=_cost(seconds, [hire.usd_per_hour for hire, _ in hires]),
        on_demand_usd=_cost(seconds, [hire.on_demand_usd_per_hour for hire, _ in hires]),
        fallback_s=math.fsum(s for s, _ in fallback),
        fallback_usd=_cost([s for s, _ in fallback], [usd for _, usd in fallback]),
    )


def _cost(seconds: list[float], usd_per_hour: list[float | None]) -> float | None:
    return _sum(None if usd is None else s * usd / 3600 for s, usd in zip(seconds, usd_per_hour, strict=True))


def _sum(amounts: Iterable[float | None]) -> float | None:
    """Return the sum, rounded once; None if an amount is not known."""
    known = list(amounts)
    return None if None in known else math.fsum(amount for amount in known if amount is not None)
