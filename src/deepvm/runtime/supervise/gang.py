"""Where the gang of a run trains: a plan's zones and failover list, and what the market offers now, in; the cluster in
another place out. The placement is the policy object that the simulator replays.

A gang moves as a whole: traffic between zones would cost more than the machines. Memory nodes stay where they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from deepvm.market.market import move_usd_per_gb
from deepvm.market.trace import region_of
from deepvm.performance.overheads import overhead
from deepvm.performance.profile import Profile
from deepvm.policy.conduct import Conduct
from deepvm.policy.loss import AfterLoss
from deepvm.policy.placement import WAIT, Placement, Stay
from deepvm.runtime.cluster import Cluster, Machine
from deepvm.units import format_bytes, format_seconds, format_usd

_GB = 1e9

Moved = tuple[Cluster, tuple[str, ...]]


class Offers(Protocol):
    """A market, at this moment."""

    def zones(self, instance: str) -> tuple[str, ...]: ...

    def capacity(self, instance: str, zone: str) -> int:
        """Return how many machines of a type the run may have there, held ones included."""
        ...

    def quote(self, machine: Machine) -> Machine:
        """Return a machine with its price of this moment."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class MoveCost:
    """What one move of the gang costs, as far as it is known."""

    still_s: float | None  # from the last step to the next
    state_bytes: int | None

    @staticmethod
    def of(cluster: Cluster, measured: Profile | None) -> MoveCost:
        """Return what the run measured, else what the plan expects."""
        if measured is None or not any(point.name == "restore" for point in measured.overheads):
            return MoveCost(still_s=cluster.restore_s, state_bytes=cluster.checkpoint_bytes)
        size = max(point.state_bytes for point in measured.overheads)
        still_s = sum(overhead([measured], name, size).seconds for name in ("regroup", "start", "restore"))
        return MoveCost(still_s=still_s, state_bytes=size)


class Gang:
    """``threshold``: the share by which another zone must be cheaper for a move; None: move only at a loss."""

    def __init__(
        self,
        offers: Offers,
        after_loss: AfterLoss,
        *,
        threshold: float | None,
        measured: Callable[[], Profile | None] = lambda: None,
    ) -> None:
        """``measured`` returns what the run has measured so far, if anything."""
        self._offers, self._after_loss, self._measured = offers, after_loss, measured
        self._threshold = threshold
        self._planned: Machine | None = None  # of the gang, as the run began

    def begin(self, cluster: Cluster) -> Cluster:
        """Return the cluster in the place where the placement starts it; as it is if the market has none for it."""
        self._planned = next(iter(cluster.gang), None)
        return self.offered(cluster) or cluster

    def offered(self, cluster: Cluster) -> Cluster | None:
        """Return the cluster in the place where the placement would start it now; None if it would wait."""
        found = self._best_zone(cluster)
        return None if found is None else in_place(cluster, found)

    def instead_of(self, cluster: Cluster, lost: Machine, why: str) -> Moved | None:
        """Return the cluster elsewhere, since the market does not have this machine: in another zone of the plan, else
        by its failover list, in its order and within the budget. None: wait where it is."""
        if self._continues(cluster, lost):
            return None
        here = self._best_zone(cluster)
        if here is not None:
            return moved(cluster, in_place(cluster, here), why, MoveCost.of(cluster, self._measured()))
        for instead in cluster.failover:
            if _kind(instead) != _kind(lost):
                continue
            there = self._best_zone(cluster, instead)
            if there is None or (there.instance, there.zone) == (lost.instance, lost.zone):
                continue
            target = in_place(cluster, there)
            if target.hourly_usd <= _budget_usd(cluster):
                return moved(cluster, target, why, MoveCost.of(cluster, self._measured()))
        return None

    def better(self, cluster: Cluster) -> Moved | None:
        """Return the cluster in a cheaper zone, or with a type of the plan that does the same work for less, if the
        difference exceeds the threshold."""
        if self._threshold is None or not cluster.gang:
            return None
        now = self._offers.quote(cluster.gang[0])
        found = self._cheaper_zone(cluster, now) or self._cheaper_type(cluster, now)
        if found is None:
            return None
        why = f"the same work costs less by more than {self._threshold:.0%}"
        return moved(in_place(cluster, now), in_place(cluster, found), why, MoveCost.of(cluster, self._measured()))

    def _cheaper_zone(self, cluster: Cluster, now: Machine) -> Machine | None:
        zones, up, usd = self._columns(cluster, now)
        if now.zone not in zones or not self._placement(cluster, zones).leave(up, usd)[zones.index(now.zone), 0]:
            return None
        found = self._best_zone(cluster)
        return None if found is None or found.zone == now.zone else found

    def _cheaper_type(self, cluster: Cluster, now: Machine) -> Machine | None:
        """Return the cheapest of the other types that the plan and its failover list have, for the same work."""
        listed = (self._planned, *cluster.failover)
        others = [each for each in listed if each is not None and _kind(each) == _kind(now)]
        found = [self._best_zone(cluster, each) for each in others if each.instance != now.instance]
        rated = {_usd_per_work(cluster, each): each for each in found if each is not None}
        best = min(rated, default=math.inf)
        if not best < (1 - (self._threshold or 0.0)) * _usd_per_work(cluster, now):
            return None
        return rated[best] if in_place(cluster, rated[best]).hourly_usd <= _budget_usd(cluster) else None

    # --- places -----------------------------------------------------------------------------------------------------

    def _continues(self, cluster: Cluster, lost: Machine) -> bool:
        """True if the others continue with fewer: the gang is not down."""
        least = self._least(cluster)
        if lost.zone is None or least >= len(cluster.gang):
            return False
        return self._offers.capacity(lost.instance, lost.zone) >= least

    def _least(self, cluster: Cluster) -> int:
        members = len(cluster.gang)
        return min(members, self._after_loss.least) if self._after_loss.wait_s == 0 else members

    def _best_zone(self, cluster: Cluster, like: Machine | None = None) -> Machine | None:
        """Return a machine of the gang, or one like ``like``, in the zone that the placement chooses. None: wait."""
        members = cluster.gang
        machine = like or (members[0] if members else None)
        if machine is None:
            return None
        zones, up, usd = self._columns(cluster, machine)
        if not zones:
            return None
        chosen = int(self._placement(cluster, zones).choose(up, usd)[0])
        return None if chosen == WAIT else self._offers.quote(replace(machine, zone=zones[chosen]))

    def _columns(self, cluster: Cluster, machine: Machine) -> tuple[list[str], np.ndarray, np.ndarray]:
        """Return the zones to choose from, whether each has enough machines, and their prices, as [zone, 1]."""
        zones = self._zones(cluster, machine)
        least = self._least(cluster)
        up = np.array([[self._offers.capacity(machine.instance, zone) >= least] for zone in zones])
        usd = np.array([[self._offers.quote(replace(machine, zone=zone)).usd_per_hour] for zone in zones])
        return zones, up, usd

    def _zones(self, cluster: Cluster, machine: Machine) -> list[str]:
        """Return the market's zones that the plan allows; without any, the machine's own, or the market's first."""
        offered = self._offers.zones(machine.instance)
        planned = cluster.conduct.zones if cluster.conduct is not None else ()
        allowed = [zone for zone in offered if zone in planned or region_of(zone) in planned]
        if allowed or not offered:
            return allowed
        return [machine.zone if machine.zone in offered else offered[0]]

    def _placement(self, cluster: Cluster, zones: Sequence[str]) -> Placement:
        if len(zones) < 2:
            return Stay(0)
        dearest = next((m.on_demand_usd_per_hour for m in cluster.gang), None)
        planned = (cluster.conduct or Conduct()).cheapest_up(most_usd=dearest)
        return replace(planned, way_back=None if self._threshold is None else 1 - self._threshold)


def in_place(cluster: Cluster, like: Machine) -> Cluster:
    """Return the cluster with its gang in the place, of the type and at the price of one machine."""
    names = {machine.name for machine in cluster.gang}
    machines = tuple(
        replace(like, name=machine.name, role=machine.role) if machine.name in names else machine
        for machine in cluster.machines
    )
    return replace(cluster, machines=machines)


def moved(present: Cluster, target: Cluster, why: str, cost: MoveCost) -> Moved:
    """Return the target, and sentences about what the move is, costs and saves. Both clusters have a gang."""
    names = {machine.name for machine in present.gang}
    old, new = present.gang[0], next(machine for machine in target.machines if machine.name in names)
    told = [
        f"the gang of {len(names)} moves from {_place(old)} to {_place(new)}: {why}",
        f"the cluster costs {format_usd(target.hourly_usd)}/h there instead of {format_usd(present.hourly_usd)}/h",
    ]
    usd = 0.0
    if cost.still_s is not None:
        still_usd = cost.still_s / 3600 * target.hourly_usd
        usd += still_usd
        told.append(
            f"the move stops training for about {format_seconds(cost.still_s)}, which costs {format_usd(still_usd)}"
        )
    if old.zone != new.zone and cost.state_bytes is not None and any(machine.keeps for machine in target.machines):
        traffic_usd = cost.state_bytes / _GB * move_usd_per_gb(old.zone, new.zone)
        usd += traffic_usd
        told.append(
            f"reading the checkpoint of {format_bytes(cost.state_bytes)} from another zone costs "
            f"{format_usd(traffic_usd)}, and so does each save: the machines that keep checkpoints stay"
        )
    saved = present.hourly_usd - target.hourly_usd
    if saved > 0 and usd > 0:
        told.append(f"it saves {format_usd(saved)}/h: the move is paid after {format_seconds(usd / saved * 3600)}")
    return target, tuple(told)


def _place(machine: Machine) -> str:
    return f"{machine.zone or machine.region or 'its place'} ({machine.instance}, {format_usd(machine.usd_per_hour)}/h)"


def _kind(machine: Machine) -> tuple[str, str]:
    return machine.role, machine.market


def _usd_per_work(cluster: Cluster, machine: Machine) -> float:
    """Return what a machine costs for one eFLOPS; infinite if the plan does not rate its type."""
    rows = cluster.plan.get("instances", ())
    eflops = next((row.get("eflops") for row in rows if row.get("instance") == machine.instance), None)
    return machine.usd_per_hour / float(eflops) if eflops else math.inf


def _budget_usd(cluster: Cluster) -> float:
    """Return what the user allows an hour; without a limit in the plan, what the cluster costs."""
    limit = cluster.plan.get("request", {}).get("budget_usd")
    return cluster.hourly_usd if limit is None else float(limit)
