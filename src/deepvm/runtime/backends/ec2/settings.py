"""``--set NAME=VALUE`` -> checked settings of a run on EC2, its default images and the end of its spending cap."""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass

from deepvm import __version__
from deepvm.errors import Infeasible, SourceFailed, UsageError
from deepvm.runtime.cluster import Cluster, Machine

_IMAGE = re.compile(r"ami-[0-9a-f]+|/[\w./-]+")
SHORTEST_H = 0.1  # of a run with a total cap: the installation takes as long


@dataclass(frozen=True, kw_only=True, slots=True)
class Ec2Settings:
    """``None`` is the plan's value, EC2's default, or no limit."""

    region: str | None = None
    zone: str | None = None  # None: the plan's, else the one where the spot machines are cheapest now
    subnet_id: str | None = None  # None: the zone's default subnet
    image: str | None = None  # an AMI, or the name of an SSM parameter that holds one
    key_name: str | None = None
    instance_profile: str | None = None  # name or ARN; allows machines to write to S3, for example
    volume_gb: int | None = None
    max_usd_per_hour: float | None = None
    max_usd: float | None = None
    package: str = f"deepvm[train,object]=={__version__}"  # what pip installs on every machine
    release_s: float = 300.0  # EC2 takes a minute or more to end machines; only then can the rest be deleted
    endpoint_url: str | None = None  # of a server with EC2's protocol

    def __post_init__(self) -> None:
        for name in ("max_usd_per_hour", "max_usd", "release_s"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise UsageError(f"{name} is {value}: it must be a number above 0")
        if self.volume_gb is not None and self.volume_gb < 8:
            raise UsageError(f"volume_gb is {self.volume_gb}: an image with torch needs at least 8")
        if self.image is not None and not _IMAGE.fullmatch(self.image):
            raise UsageError(f"the image {self.image!r} is neither an AMI (ami-…) nor an SSM parameter (/…)")
        if not self.package.strip() or self.package.startswith("-"):
            raise UsageError(f"package is {self.package!r}: it must be a requirement that pip can install")


def image_of(machine: Machine, architecture: str) -> str:
    """Return the SSM parameter of a machine's default image: with GPU drivers if the machine trains."""
    if machine.trains:
        return f"/aws/service/deeplearning/ami/{architecture}/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
    processor = "arm64" if architecture == "arm64" else "amd64"
    return f"/aws/service/canonical/ubuntu/server/22.04/stable/current/{processor}/hvm/ebs-gp2/ami-id"


def end_s(settings: Ec2Settings, cluster: Cluster) -> float | None:
    """Return when a run that starts now reaches its total cap, at the plan's prices; None without a cap."""
    if settings.max_usd is None:
        return None
    if not cluster.hourly_usd > 0:
        raise SourceFailed("the plan has no prices, so max_usd cannot be enforced: leave it out")
    hours = settings.max_usd / cluster.hourly_usd
    if hours < SHORTEST_H:
        raise Infeasible(
            f"max_usd is ${settings.max_usd:.2f}, which pays for {hours * 60:.1f} minutes at "
            f"${cluster.hourly_usd:.4f}/h, less than the installation: raise max_usd, or plan with a smaller --budget"
        )
    return float(int(time.time() + hours * 3600))
