"""What a run has on EC2, found by its tag alone, and ended: fleets, machines, disks, templates, the security group."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from deepvm.errors import SourceFailed
from deepvm.runtime.backends.ec2.calls import Calls, Ec2Refused
from deepvm.runtime.backends.ec2.instances import Seen, instances_of
from deepvm.runtime.backends.ec2.requests import RUN_TAG, by_tag

FLEETS_AT_ONCE = 25  # that one request may delete, if they are instant
PAUSE_S = 3.0
# A fleet that is told to be one of these is as good as deleted.
FLEET_GONE = frozenset({"fleetIdDoesNotExist", "fleetNotInDeletableState"})

STILL_USED = frozenset({"DependencyViolation", "InvalidGroup.InUse", "VolumeInUse"})


def release(calls: Calls, run: str, *, within_s: float) -> None:
    """End it all. SourceFailed names what is left after ``within_s``; it may be called again, from anywhere."""
    if calls.dry_run:
        _show(calls, run)
        return
    ends = time.monotonic() + within_s
    left = _delete_fleets(calls, run)
    alive = _end_instances(calls, run, ends)
    left += [f"{seen.id} ({seen.state})" for seen in alive]
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
            f"of run {run} these are still in {calls.region}: {', '.join(left)}: "
            f"call deepvm run --down {run} again in some minutes, or delete them in the console"
        )


def fleets_of(calls: Calls, run: str) -> list[str]:
    """Through the tags: EC2 lists instant fleets only to those who know their names."""
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
            left += [f"{fleet} ({error.code})" for fleet in some]  # the machines must be ended all the same
            continue
        for row in answer.get("UnsuccessfulFleetDeletions", []):
            code = row.get("Error", {}).get("Code", "unknown")
            if code not in FLEET_GONE:
                left.append(f"{row.get('FleetId')} ({code})")
    return left


def _end_instances(calls: Calls, run: str, ends: float) -> list[Seen]:
    """Asked again each time: a fleet may have been starting one while it was deleted."""
    while True:
        alive = [seen for seen in instances_of(calls, run) if seen.state != "terminated"]
        going = [seen.id for seen in alive if seen.state != "shutting-down"]
        if going:
            calls.change("ec2", "terminate_instances", {"InstanceIds": going})
        if not alive or time.monotonic() > ends:
            return alive
        time.sleep(min(PAUSE_S, max(0.0, ends - time.monotonic())))


def _delete(calls: Calls, operation: str, key: str, name: str, ends: float) -> list[str]:
    """Tried again while something still uses it. What could not be deleted, in words."""

    def once() -> None:
        calls.change("ec2", operation, {key: name})

    code = _until(once, ends, again=STILL_USED)
    return [] if code is None or ".NotFound" in code else [f"{name} ({code})"]


def _until(what: Callable[[], None], ends: float, *, again: Iterable[str]) -> str | None:
    while True:
        try:
            what()
        except Ec2Refused as error:
            if error.code not in again or time.monotonic() > ends:
                return error.code
            time.sleep(min(PAUSE_S, max(0.0, ends - time.monotonic())))
        else:
            return None


def _show(calls: Calls, run: str) -> None:
    every = f"<every one tagged {RUN_TAG}={run}>"
    calls.change("ec2", "delete_fleets", {"FleetIds": [every], "TerminateInstances": True})
    calls.change("ec2", "terminate_instances", {"InstanceIds": [every]})
    calls.change("ec2", "delete_launch_template", {"LaunchTemplateId": every})
    calls.change("ec2", "delete_volume", {"VolumeId": every})
    calls.change("ec2", "delete_security_group", {"GroupId": every})
