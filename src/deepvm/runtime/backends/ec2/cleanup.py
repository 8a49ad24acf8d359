"""A run's name -> all of it on EC2 ended, found by its tag: fleets, machines, disks, templates, security group."""

from __future__ import annotations

import time
from typing import Any

from deepvm.errors import SourceFailed
from deepvm.runtime.backends.ec2.calls import Calls, Ec2Refused
from deepvm.runtime.backends.ec2.instances import Ec2Instance, instances_of
from deepvm.runtime.backends.ec2.requests import RUN_TAG, by_tag

FLEETS_AT_ONCE = 25  # EC2's limit for one request with instant fleets
PAUSE_S = 3.0
# Errors that mean that a fleet does not exist any more.
FLEET_GONE = frozenset({"fleetIdDoesNotExist", "fleetNotInDeletableState"})

STILL_USED = frozenset({"DependencyViolation", "InvalidGroup.InUse", "VolumeInUse"})


def release(calls: Calls, run: str, *, within_s: float) -> None:
    """End everything. Raise SourceFailed with what is left after ``within_s``; it may be called again."""
    if calls.dry_run:
        _show(calls, run)
        return
    ends = time.monotonic() + within_s
    left = _delete_fleets(calls, run)
    alive = _end_instances(calls, run, ends)
    left += [f"{instance.id} ({instance.state})" for instance in alive]
    for row in calls.rows("ec2", "describe_launch_templates", "LaunchTemplates", Filters=by_tag(run)):
        name = row["LaunchTemplateId"]
        left += _delete(calls, "delete_launch_template", "LaunchTemplateId", name, ends)
    kept = [*by_tag(run), {"Name": "status", "Values": ["available"]}]  # first disks go with their machines
    for row in calls.rows("ec2", "describe_volumes", "Volumes", Filters=kept):
        left += _delete(calls, "delete_volume", "VolumeId", row["VolumeId"], ends)
    for row in calls.rows("ec2", "describe_security_groups", "SecurityGroups", Filters=by_tag(run)):
        left += _delete(calls, "delete_security_group", "GroupId", row["GroupId"], ends)
    if left:
        raise SourceFailed(
            f"run {run} still has {', '.join(left)} in {calls.region}: "
            f"repeat deepvm run --down {run} in some minutes, or delete them in the console"
        )


def fleets_of(calls: Calls, run: str) -> list[str]:
    """Return a run's fleets, through tags: EC2 describes instant fleets only by id."""
    filters: list[dict[str, Any]] = [
        {"Name": "resource-type", "Values": ["fleet"]},
        {"Name": "key", "Values": [RUN_TAG]},
        {"Name": "value", "Values": [run]},
    ]
    return sorted({row["ResourceId"] for row in calls.rows("ec2", "describe_tags", "Tags", Filters=filters)})


def _delete_fleets(calls: Calls, run: str) -> list[str]:
    found, left = fleets_of(calls, run), []
    for at in range(0, len(found), FLEETS_AT_ONCE):
        some = found[at : at + FLEETS_AT_ONCE]
        try:
            answer = calls.change("ec2", "delete_fleets", {"FleetIds": some, "TerminateInstances": True})
        except Ec2Refused as error:
            left += [f"{fleet} ({error.code})" for fleet in some]  # the machines must be ended in any case
            continue
        for row in answer.get("UnsuccessfulFleetDeletions", []):
            code = row.get("Error", {}).get("Code", "unknown")
            if code not in FLEET_GONE:
                left.append(f"{row.get('FleetId')} ({code})")
    return left


def _end_instances(calls: Calls, run: str, ends: float) -> list[Ec2Instance]:
    """Terminate instances until none is left, and return the rest. Each round lists them again, since a fleet may have
    started one while it was deleted."""
    while True:
        alive = [instance for instance in instances_of(calls, run) if instance.state != "terminated"]
        running = [instance.id for instance in alive if instance.state != "shutting-down"]
        if running:
            calls.change("ec2", "terminate_instances", {"InstanceIds": running})
        if not alive or time.monotonic() > ends:
            return alive
        time.sleep(min(PAUSE_S, max(0.0, ends - time.monotonic())))


def _delete(calls: Calls, operation: str, key: str, name: str, ends: float) -> list[str]:
    """Delete a resource, and retry while something uses it. Return it with the reason if it is left."""
    while True:
        try:
            calls.change("ec2", operation, {key: name})
        except Ec2Refused as error:
            if ".NotFound" in error.code:
                return []
            if error.code not in STILL_USED or time.monotonic() > ends:
                return [f"{name} ({error.code})"]
            time.sleep(min(PAUSE_S, max(0.0, ends - time.monotonic())))
        else:
            return []


def _show(calls: Calls, run: str) -> None:
    every = f"<every one tagged {RUN_TAG}={run}>"
    calls.change("ec2", "delete_fleets", {"FleetIds": [every], "TerminateInstances": True})
    calls.change("ec2", "terminate_instances", {"InstanceIds": [every]})
    calls.change("ec2", "delete_launch_template", {"LaunchTemplateId": every})
    calls.change("ec2", "delete_volume", {"VolumeId": every})
    calls.change("ec2", "delete_security_group", {"GroupId": every})
