"""A run's instances as EC2 tells them, and why one is gone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepvm.runtime.backends.ec2.calls import Calls
from deepvm.runtime.backends.ec2.requests import GROUP_TAG, MACHINE_TAG, by_tag, tag_of

ALIVE = frozenset({"pending", "running"})
PREEMPTED = frozenset({"Server.SpotInstanceTermination", "Server.SpotInstanceShutdown"})
# What fleets say where there are none to be had, or none at that price, or no more for this account.
NO_CAPACITY = frozenset(
    {
        "InsufficientInstanceCapacity", "InsufficientHostCapacity", "InsufficientCapacity", "UnfulfillableCapacity",
        "InsufficientFreeAddressesInSubnet", "SpotMaxPriceTooLow", "MaxSpotInstanceCountExceeded",
        "MaxFleetCountExceeded", "VcpuLimitExceeded", "InstanceLimitExceeded", "Unsupported",
    }
)  # fmt: skip
# The same from a fleet that goes on trying: the events of its history that tell of trouble.
TROUBLE = frozenset(
    {
        "allLaunchSpecsTemporarilyBlacklisted", "launchSpecTemporarilyBlacklisted", "launchSpecUnusable",
        "fleetProgressHalted", "spotInstanceCountLimitExceeded", "spotFleetRequestConfigurationInvalid",
        "iamFleetRoleInvalid",
    }
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    id: str
    state: str
    group: str | None
    machine: str | None  # from its tag, once it has one
    address: str | None
    reason: str
    launched: Any

    @property
    def alive(self) -> bool:
        return self.state in ALIVE


def instances_of(calls: Calls, run: str) -> list[Seen]:
    """The oldest first. Those that ended are told by EC2 for about an hour."""
    reservations = calls.rows("ec2", "describe_instances", "Reservations", Filters=by_tag(run))
    rows = [row for reservation in reservations for row in reservation["Instances"]]
    return sorted(map(_seen, rows), key=lambda seen: (seen.launched, seen.id))


def _seen(row: dict[str, Any]) -> Seen:
    return Seen(
        id=row["InstanceId"],
        state=row["State"]["Name"],
        group=tag_of(row, GROUP_TAG),
        machine=tag_of(row, MACHINE_TAG),
        address=row.get("PrivateIpAddress"),
        reason=str(row.get("StateReason", {}).get("Code", "")),
        launched=row["LaunchTime"],
    )


def why_down(seen: Seen | None, *, own: str | None, over: bool) -> str:
    """``own``: what we did to it ourselves. ``over``: the run's total cap is reached."""
    if own is not None:
        return own
    if seen is None:
        return "lost"
    if seen.reason in PREEMPTED:
        return "preempted"
    if seen.reason == "Client.InstanceInitiatedShutdown":
        return "ended" if over else "failed"  # before that, machines shut down only where they could not join
    return "lost"


def troubles(calls: Calls, fleet_id: str, since: Any) -> list[str]:
    """What keeps a fleet from having all its machines, in its own words, newest last."""
    answer = calls.read("ec2", "describe_fleet_history", FleetId=fleet_id, StartTime=since)
    events = [record.get("EventInformation", {}) for record in answer.get("HistoryRecords", [])]
    return [
        f"{event['EventSubType']}: {str(event.get('EventDescription', ''))[:200]}".rstrip(": ")
        for event in events
        if event.get("EventSubType") in TROUBLE
    ]
