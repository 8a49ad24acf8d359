"""What a user may say about a run on EC2, checked when it is said."""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass

from deepvm import __version__
from deepvm.errors import Infeasible, SourceFailed, UsageError
from deepvm.runtime.cluster import Cluster, Machine

_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # it becomes part of names that EC2 restricts
_IMAGE = re.compile(r"ami-[0-9a-f]+|/[\w./-]+")
SHORTEST_H = 0.1  # of a run with a total cap: less would be spent on installing


@dataclass(frozen=True, kw_only=True, slots=True)
class Ec2Settings:
    """``None`` means: the plan's, EC2's own, or no limit."""

    region: str | None = None
    zone: str | None = None  # without one: the plan's, else the one where the spot machines are cheapest now
    subnet_id: str | None = None  # without one: the zone's default subnet
    image: str | None = None  # an AMI, or the name of an SSM parameter that holds one
    key_name: str | None = None
    instance_profile: str | None = None  # name or ARN; lets machines write to S3, say
    volume_gb: int | None = None
    max_usd_per_hour: float | None = None
    max_usd: float | None = None
    package: str = f"deepvm[train,object]=={__version__}"  # what pip installs on every machine
    release_s: float = 300.0  # EC2 takes a minute or more to end machines; only then can the rest be deleted
    endpoint_url: str | None = None  # of something that speaks EC2's protocol

    def __post_init__(self) -> None:
        for name in ("max_usd_per_hour", "max_usd", "release_s"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise UsageError(f"{name} is {value}: it must be a number above 0")
        if self.volume_gb is not None and self.volume_gb < 8:
            raise UsageError(f"a volume of {self.volume_gb} GB cannot hold an image with torch: 8 GB at least")
        if self.image is not None and not _IMAGE.fullmatch(self.image):
            raise UsageError(f"the image {self.image!r} is neither an AMI (ami-…) nor an SSM parameter (/…)")
        if not self.package.strip() or self.package.startswith("-"):
            raise UsageError(f"the package {self.package!r} is no requirement that pip could install")


def check_run_name(run: str) -> str:
    if not _RUN.fullmatch(run):
        raise UsageError(f"a run on EC2 cannot be called {run!r}: letters, digits, '.', '_' and '-', 64 at most")
    return run


def image_of(machine: Machine, architecture: str) -> str:
    """The SSM parameter with the image that a machine gets by default: with drivers where there is a GPU to drive."""
    if machine.trains:
        return f"/aws/service/deeplearning/ami/{architecture}/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
    processor = "arm64" if architecture == "arm64" else "amd64"
    return f"/aws/service/canonical/ubuntu/server/22.04/stable/current/{processor}/hvm/ebs-gp2/ami-id"


def end_s(settings: Ec2Settings, cluster: Cluster) -> float | None:
    """When a run has cost what it may, counted from now at the plan's prices."""
    if settings.max_usd is None:
        return None
    if not cluster.hourly_usd > 0:
        raise SourceFailed("the plan knows no prices, so that a total cap cannot be held: leave --max-usd out")
    hours = settings.max_usd / cluster.hourly_usd
    if hours < SHORTEST_H:
        raise Infeasible(
            f"${settings.max_usd:.2f} pay for {hours * 60:.1f} minutes of ${cluster.hourly_usd:.4f}/h, which are over "
            "before anything is installed: raise --max-usd, or plan with a smaller --budget"
        )
    return float(int(time.time() + hours * 3600))
