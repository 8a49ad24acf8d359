"""A run's groups of machines -> the parameters of requests to EC2. Pure; ``launcher`` sends them."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from deepvm.runtime.backends.ec2.settings import Ec2Settings
from deepvm.runtime.cluster import Machine, Market, RoleName

RUN_TAG, GROUP_TAG, MACHINE_TAG = "deepvm:run", "deepvm:group", "deepvm:machine"
Request = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ec2Group:
    """Machines of one role, type and market, with one launch template and one fleet."""

    role: RoleName
    instance: str
    market: Market
    hub: bool = False  # the machine with the hub is a group of its own

    @property
    def name(self) -> str:
        return "hub" if self.hub else f"{self.role}-{self.instance}-{self.market}"

    @property
    def maintained(self) -> bool:
        """True if EC2 replaces its machines by itself: docs/decisions/0010."""
        return self.market == "spot"


def group_of(machine: Machine, hub: str) -> Ec2Group:
    is_hub = machine.name == hub
    return Ec2Group(role=machine.role, instance=machine.instance, market=machine.market, hub=is_hub)


def groups_of(machines: Iterable[Machine], hub: str) -> dict[Ec2Group, list[Machine]]:
    """Group machines in the order of their start: the hub, other on-demand machines, spot."""
    found: dict[Ec2Group, list[Machine]] = {}
    for machine in sorted(machines, key=lambda m: (m.name != hub, m.market == "spot")):
        found.setdefault(group_of(machine, hub), []).append(machine)
    return found


def tags(run: str, **more: str) -> list[dict[str, str]]:
    return [{"Key": RUN_TAG, "Value": run}, *({"Key": f"deepvm:{key}", "Value": more[key]} for key in more)]


def group_tags(run: str, group: Ec2Group) -> list[dict[str, str]]:
    return tags(run, role=group.role, group=group.name)


def by_tag(run: str) -> list[dict[str, Any]]:
    return [{"Name": f"tag:{RUN_TAG}", "Values": [run]}]


def tag_of(row: Mapping[str, Any], key: str) -> str | None:
    return next((str(tag["Value"]) for tag in row.get("Tags", []) if tag["Key"] == key), None)


def client_token(run: str, start: str, group: Ec2Group, attempt: int, names: Sequence[str]) -> str:
    """Return the same token for a repeated request, so that EC2 executes it once. ``start`` differs between two runs of
    one name: EC2 remembers tokens for days."""
    text = "\n".join((run, start, group.name, str(attempt), *names))
    return f"deepvm-{hashlib.sha256(text.encode()).hexdigest()[:40]}"


def security_group(run: str, vpc_id: str) -> Request:
    return {
        "GroupName": f"deepvm-{run}",
        "Description": f"deepvm run {run}: its machines among themselves",
        "VpcId": vpc_id,
        "TagSpecifications": [{"ResourceType": "security-group", "Tags": tags(run)}],
    }


def ingress_from_itself(group_id: str) -> Request:
    return {
        "GroupId": group_id,
        "IpPermissions": [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group_id}]}],
    }


def launch_template(
    run: str,
    group: Ec2Group,
    settings: Ec2Settings,
    *,
    image_id: str,
    root_device: str | None,
    security_group_id: str,
    user_data: str,
) -> Request:
    data: Request = {
        "ImageId": image_id,
        "InstanceType": group.instance,
        "SecurityGroupIds": [security_group_id],
        "UserData": base64.b64encode(user_data.encode()).decode(),
        "InstanceInitiatedShutdownBehavior": "terminate",  # a stopped machine would still cost money
        "MetadataOptions": {"HttpEndpoint": "enabled", "HttpTokens": "required", "HttpPutResponseHopLimit": 1},
        "TagSpecifications": [
            {"ResourceType": kind, "Tags": group_tags(run, group)}
            for kind in ("instance", "volume", "network-interface")
        ],
    }
    if settings.key_name is not None:
        data["KeyName"] = settings.key_name
    if settings.instance_profile is not None:
        kind = "Arn" if settings.instance_profile.startswith("arn:") else "Name"
        data["IamInstanceProfile"] = {kind: settings.instance_profile}
    if settings.volume_gb is not None:
        disk = {"VolumeSize": settings.volume_gb, "VolumeType": "gp3", "DeleteOnTermination": True}
        data["BlockDeviceMappings"] = [{"DeviceName": root_device, "Ebs": disk}]
    return {
        "LaunchTemplateName": f"deepvm-{run}-{group.name}",
        "LaunchTemplateData": data,
        "TagSpecifications": [{"ResourceType": "launch-template", "Tags": group_tags(run, group)}],
    }


def fleet(
    run: str,
    group: Ec2Group,
    *,
    count: int,
    template_id: str,
    subnet_id: str,
    token: str,
    max_usd_per_hour: float | None,  # for this fleet
    ends_at_s: float | None,
) -> Request:
    most = {} if max_usd_per_hour is None else {"MaxTotalPrice": f"{max_usd_per_hour:.4f}"}
    request: Request = {
        "ClientToken": token,
        "Type": "maintain" if group.maintained else "instant",
        "LaunchTemplateConfigs": [
            {
                "LaunchTemplateSpecification": {"LaunchTemplateId": template_id, "Version": "1"},
                "Overrides": [{"InstanceType": group.instance, "SubnetId": subnet_id}],
            }
        ],
        "TargetCapacitySpecification": {"TotalTargetCapacity": count, "DefaultTargetCapacityType": group.market},
        "TagSpecifications": [{"ResourceType": "fleet", "Tags": group_tags(run, group)}],
    }
    if not group.maintained:
        return request | {"OnDemandOptions": {"AllocationStrategy": "lowest-price"} | most}
    request |= {
        "SpotOptions": {
            "AllocationStrategy": "price-capacity-optimized",
            "InstanceInterruptionBehavior": "terminate",
        }
        | most,
        "ExcessCapacityTerminationPolicy": "no-termination",  # machines are terminated by name
        "ReplaceUnhealthyInstances": True,
        "TerminateInstancesWithExpiration": True,
    }
    if ends_at_s is not None:
        request["ValidUntil"] = datetime.fromtimestamp(int(ends_at_s), timezone.utc)
    return request


def resized(fleet_id: str, count: int) -> Request:
    return {
        "FleetId": fleet_id,
        "ExcessCapacityTerminationPolicy": "no-termination",
        "TargetCapacitySpecification": {"TotalTargetCapacity": count},
    }
