"""EC2's descriptions of a run's instances and fleets -> states, reasons of an end, missing capacity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepvm.runtime.backends.ec2.calls import Calls
from deepvm.runtime.backends.ec2.requests import GROUP_TAG, MACHINE_TAG, by_tag, tag_of

ALIVE = frozenset({"pending", "running"})
PREEMPTED = frozenset({"Server.SpotInstanceTermination", "Server.SpotInstanceShutdown"})
# Errors of fleets without capacity, at that price, or within this account's limits.
NO_CAPACITY = frozenset(
    {
        "InsufficientInstanceCapacity", "InsufficientHostCapacity", "InsufficientCapacity", "UnfulfillableCapacity",
        "InsufficientFreeAddressesInSubnet", "SpotMaxPriceTooLow", "MaxSpotInstanceCountExceeded",
        "MaxFleetCountExceeded", "VcpuLimitExceeded", "InstanceLimitExceeded", "Unsupported",
    }
)  # fmt: skip
# The same for a fleet that keeps trying: the event types of its history that report a problem.
TROUBLE = frozenset(
    {
        "allLaunchSpecsTemporarilyBlacklisted", "launchSpecTemporarilyBlacklisted", "launchSpecUnusable",
        "fleetProgressHalted", "spotInstanceCountLimitExceeded", "spotFleetRequestConfigurationInvalid",
        "iamFleetRoleInvalid",
    }
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Ec2Instance:
    id: str
    state: str
    group: str | None
    machine: str | None  # from its tag, if it has one
    address: str | None
    reason: str
    launched: Any

    @property
    def alive(self) -> bool:
        return self.state in ALIVE


def instances_of(calls: Calls, run: str) -> list[Ec2Instance]:
    """Return a run's instances, oldest first. EC2 lists those that ended for about an hour."""
    reservations = calls.rows("ec2", "describe_instances", "Reservations", Filters=by_tag(run))
    rows = [row for reservation in reservations for row in reservation["Instances"]]
    return sorted(map(_instance, rows), key=lambda instance: (instance.launched, instance.id))


def _instance(row: dict[str, Any]) -> Ec2Instance:
    return Ec2Instance(
        id=row["InstanceId"],
        state=row["State"]["Name"],
        group=tag_of(row, GROUP_TAG),
        machine=tag_of(row, MACHINE_TAG),
        address=row.get("PrivateIpAddress"),
        reason=str(row.get("StateReason", {}).get("Code", "")),
        launched=row["LaunchTime"],
    )


def why_down(instance: Ec2Instance | None, *, own: str | None, over: bool) -> str:
    """Return why an instance ended. ``own``: the reason if this process ended it; ``over``: the run's total cap is
    reached."""
    if own is not None:
        return own
    if instance is not None and instance.reason in PREEMPTED:
        return "preempted"
    if instance is not None and instance.reason == "Client.InstanceInitiatedShutdown":
        return "ended" if over else "failed"  # before the cap, a machine shuts itself down only if it could not join
    return "lost"


def troubles(calls: Calls, fleet_id: str, since: Any) -> list[str]:
    """Return EC2's reasons why a fleet does not have all its machines, newest last."""
    answer = calls.read("ec2", "describe_fleet_history", FleetId=fleet_id, StartTime=since)
    events = [record.get("EventInformation", {}) for record in answer.get("HistoryRecords", [])]
    return [
        f"{event['EventSubType']}: {str(event.get('EventDescription', ''))[:200]}".rstrip(": ")
        for event in events
        if event.get("EventSubType") in TROUBLE
    ]
