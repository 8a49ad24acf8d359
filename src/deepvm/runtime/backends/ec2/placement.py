"""A run's settings and machines -> its region, zone, subnet and image on EC2."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from deepvm.catalog.sources.aws_names import architecture_of
from deepvm.errors import SourceFailed, UsageError
from deepvm.runtime.backends.ec2.calls import Calls, Ec2Refused
from deepvm.runtime.backends.ec2.settings import Ec2Settings, image_of
from deepvm.runtime.cluster import Cluster, Machine

DEFAULT_ROOT = "/dev/sda1"  # the first disk of Ubuntu's images


@dataclass(frozen=True, kw_only=True, slots=True)
class Ec2Place:
    zone: str
    subnet_id: str
    vpc_id: str


def region_of(settings: Ec2Settings, cluster: Cluster) -> str:
    elsewhere = next((m for m in cluster.machines if m.cloud not in (None, "aws")), None)
    if elsewhere is not None:
        raise UsageError(
            f"{elsewhere.name} is planned on {elsewhere.cloud}, and --on ec2 has machines of aws alone: "
            "use --on skypilot, or plan with --catalog aws"
        )
    planned = next((m.region for m in _spot_first(cluster.machines) if m.region), None)
    region = settings.region or planned
    if not region:
        raise UsageError("neither the plan nor the settings name a region: add --set region=us-east-1")
    return region


def find_place(calls: Calls, settings: Ec2Settings, machines: Sequence[Machine]) -> Ec2Place:
    zone = settings.zone or next((m.zone for m in _spot_first(machines) if m.zone and m.region == calls.region), None)
    if calls.dry_run:
        zone = zone or "<the zone where the spot machines are cheapest>"
        return Ec2Place(zone=zone, subnet_id=settings.subnet_id or f"<subnet in {zone}>", vpc_id="<its VPC>")
    if settings.subnet_id is not None:
        subnets = calls.rows("ec2", "describe_subnets", "Subnets", SubnetIds=[settings.subnet_id])
    else:
        if zone is None:
            zone = cheapest_zone(calls, machines)
        filters = [{"Name": "default-for-az", "Values": ["true"]}]
        filters += [{"Name": "availability-zone", "Values": [zone]}] if zone else []
        subnets = calls.rows("ec2", "describe_subnets", "Subnets", Filters=filters)
    if not subnets:
        where = zone or calls.region
        raise SourceFailed(f"{where} has no default subnet: add --set subnet_id=subnet-…")
    chosen = min(subnets, key=lambda row: str(row["AvailabilityZone"]))
    found = Ec2Place(zone=chosen["AvailabilityZone"], subnet_id=chosen["SubnetId"], vpc_id=chosen["VpcId"])
    if settings.zone is not None and settings.zone != found.zone:
        raise UsageError(f"zone is {settings.zone}, but {found.subnet_id} is in {found.zone}: leave one of them out")
    return found


def cheapest_zone(calls: Calls, machines: Sequence[Machine]) -> str | None:
    """Return the zone where the spot machines together cost least now; None without spot machines."""
    counts = Counter(machine.instance for machine in machines if machine.market == "spot")
    if not counts:
        return None
    now = datetime.now(timezone.utc)
    newest: dict[tuple[str, str], Any] = {}
    for row in calls.rows(
        "ec2", "describe_spot_price_history", "SpotPriceHistory",
        InstanceTypes=sorted(counts), ProductDescriptions=["Linux/UNIX"], StartTime=now, EndTime=now,
    ):  # fmt: skip
        key = row["AvailabilityZone"], row["InstanceType"]
        if key not in newest or row["Timestamp"] > newest[key]["Timestamp"]:
            newest[key] = row
    prices = {
        zone: sum(count * float(newest[zone, instance]["SpotPrice"]) for instance, count in counts.items())
        for zone in sorted({zone for zone, _ in newest})
        if all((zone, instance) in newest for instance in counts)
    }
    if not prices:
        raise SourceFailed(f"no zone of {calls.region} sells {' and '.join(sorted(counts))} as spot machines")
    return min(prices, key=lambda zone: prices[zone])


def find_image(calls: Calls, settings: Ec2Settings, machine: Machine) -> tuple[str, str | None]:
    """Return an AMI, and the name of its first disk if a volume size is set."""
    image = settings.image or image_of(machine, architecture_of(machine.instance))
    if calls.dry_run:
        return image if image.startswith("ami-") else f"<the image that {image} holds>", DEFAULT_ROOT
    if image.startswith("/"):
        try:
            image = calls.read("ssm", "get_parameter", Name=image)["Parameter"]["Value"]
        except Ec2Refused as error:
            raise SourceFailed(f"{error}: {image} names no image; add --set image=ami-…") from None
    if settings.volume_gb is None:
        return image, None
    rows = calls.read("ec2", "describe_images", ImageIds=[image])["Images"]
    if not rows:
        raise SourceFailed(f"image {image} does not exist in {calls.region}: add --set image=ami-…")
    return image, rows[0].get("RootDeviceName", DEFAULT_ROOT)


def _spot_first(machines: Sequence[Machine]) -> list[Machine]:
    return sorted(machines, key=lambda machine: machine.market != "spot")
