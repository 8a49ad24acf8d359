"""Prices of traffic that leaves a zone: a cloud, or the spelling of a zone, in; dollars for a gigabyte out.

List prices of 2026. Within a zone, traffic between private addresses is free in all of them.
"""

from __future__ import annotations

import re

_BETWEEN_ZONES_USD_PER_GB = {
    "aws": 0.02,  # $0.01 where it leaves and $0.01 where it arrives (EC2 pricing, data transfer)
    "gcp": 0.01,  # where it leaves (VPC pricing)
    "azure": 0.0,  # not charged (bandwidth pricing)
}
# Between most regions of AWS; between regions of one continent, North America or Europe, of the others.
_BETWEEN_REGIONS_USD_PER_GB = {"aws": 0.02, "gcp": 0.02, "azure": 0.02}
_SPELLINGS = {  # of regions and zones; a number after a slash stands for one of a region's zones
    "aws": re.compile(r"[a-z]{2}(-[a-z]+)+-\d+([a-z]|-[a-z]+-\d+[a-z]?|/\d+)?|[a-z]{3,5}\d-az\d+"),
    "gcp": re.compile(r"[a-z]+-[a-z]+\d+(-[a-z]|/\d+)?"),
    "azure": re.compile(r"[a-z]{6,}\d?(-\d|/\d+)?"),
}


def between_zones_usd_per_gb(cloud: str | None) -> float:
    """Return the price between zones of one region. An unknown cloud's is the dearest one, and never zero."""
    return _of(_BETWEEN_ZONES_USD_PER_GB, cloud)


def between_regions_usd_per_gb(cloud: str | None) -> float:
    return _of(_BETWEEN_REGIONS_USD_PER_GB, cloud)


def cloud_of_zone(zone: str | None) -> str | None:
    """Return the cloud that spells a zone or a region like this; None if it is unknown."""
    return next((cloud for cloud, spelling in _SPELLINGS.items() if spelling.fullmatch(zone or "")), None)


def _of(prices: dict[str, float], cloud: str | None) -> float:
    return prices.get(cloud or "", max(prices.values()))
