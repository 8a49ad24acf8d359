"""Prices of traffic between zones of one region: a cloud in, dollars for a gigabyte that arrives out.

List prices of 2026. Within a zone, traffic between private addresses is free in all of them.
"""

from __future__ import annotations

_BETWEEN_ZONES_USD_PER_GB = {
    "aws": 0.02,  # $0.01 where it leaves and $0.01 where it arrives (EC2 pricing, data transfer)
    "gcp": 0.01,  # where it leaves (VPC pricing)
    "azure": 0.0,  # not charged (bandwidth pricing)
}
_UNKNOWN_USD_PER_GB = max(_BETWEEN_ZONES_USD_PER_GB.values())  # a missing price never counts as zero


def between_zones_usd_per_gb(cloud: str) -> float:
    return _BETWEEN_ZONES_USD_PER_GB.get(cloud, _UNKNOWN_USD_PER_GB)
