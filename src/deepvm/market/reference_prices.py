"""Machine types and on-demand prices for traces that name accelerators only: an accelerator and a zone in; out, the
types whose prices add up to one machine's, and USD an hour.

List prices, looked up on 2026-08-22 (AWS, us-east-1) or published by the cloud before a type was retired. A user's own
price replaces them.
"""

from __future__ import annotations

import re

# Of the on-demand price, where a trace has no spot prices either: the median of the 22 GPU types of the built-in
# catalogue aws-2026-08 that have both prices; half of them are between 53 % and 88 %.
SPOT_SHARE = 0.7
SPOT_SHARE_SOURCE = "the median of AWS's GPU types in August 2026"

# USD an hour of one accelerator, or of the machine where the name is one's.
_AWS = {
    "V100": 3.06,  # p3.2xlarge
    "K80": 0.90,  # p2.xlarge
    "T4": 0.526,  # g4dn.xlarge
    "A10G": 1.006,  # g5.xlarge
    "L4": 0.8048,  # g6.xlarge
    "A100": 2.7447,  # p4d.24xlarge / 8
    "H100": 6.88,  # p5.4xlarge
}
_GOOGLE = {
    "V100": 2.67,  # n1-standard-8 with one V100
    "T4": 0.54,
    "L4": 0.7068,  # g2-standard-4
    "A100": 3.6734,  # a2-highgpu-1g
    "H100": 11.06,  # a3-highgpu-8g / 8
}
_MACHINES = {"INTEL": 4.032, "C3-88": 4.5936}  # r5.16xlarge, c3-standard-88
_AWS_TYPES = {
    ("V100", 1): "p3.2xlarge",
    ("V100", 4): "p3.8xlarge",
    ("V100", 8): "p3.16xlarge",
    ("K80", 1): "p2.xlarge",
    ("K80", 8): "p2.8xlarge",
    ("K80", 16): "p2.16xlarge",
    ("T4", 1): "g4dn.xlarge",
    ("T4", 4): "g4dn.12xlarge",
    ("T4", 8): "g4dn.metal",
    ("A10G", 1): "g5.xlarge",
    ("A10G", 4): "g5.12xlarge",
    ("A10G", 8): "g5.48xlarge",
    ("L4", 1): "g6.xlarge",
    ("L4", 4): "g6.12xlarge",
    ("L4", 8): "g6.48xlarge",
    ("A100", 8): "p4d.24xlarge",
    ("H100", 8): "p5.48xlarge",
}
_AWS_MACHINES = {"INTEL": "r5.16xlarge"}
_GOOGLE_HOSTS = {
    "A100": "a2-highgpu-{count}g",
    "H100": "a3-highgpu-{count}g",
    "L4": "g2-standard-4",
    "T4": "n1-standard-8",
    "V100": "n1-standard-8",
    "K80": "n1-standard-8",
}
_GOOGLE_MACHINES = {"C3-88": "c3-highcpu-88"}
_DIRECTIONS = re.compile(r"north|south|east|west|central|gov")


def on_demand_usd(accelerator: str | None, count: int, zone: str) -> float | None:
    """Return the price of a machine with ``count`` accelerators; None if it is unknown."""
    name = (accelerator or "").upper()
    if name in _MACHINES:
        return _MACHINES[name]
    each = (_GOOGLE if _of_google(zone) else _AWS).get(name)
    return None if each is None else each * count


def machine_types(accelerator: str | None, count: int, zone: str) -> tuple[str, ...]:
    """Return the types whose prices add up to one machine's, as price histories call them; none if unknown.

    Google Cloud bills hosts and accelerators apart."""
    name = (accelerator or "").upper()
    if not _of_google(zone):
        found = _AWS_TYPES.get((name, count)) or _AWS_MACHINES.get(name)
        return () if found is None else (found,)
    if name in _GOOGLE_MACHINES:
        return (_GOOGLE_MACHINES[name],)
    host = _GOOGLE_HOSTS.get(name)
    return () if host is None else (host.format(count=count), f"acc:{name}:{count}")


def zone_id_region(region: str) -> str:
    """Return what AWS's zone IDs call a region: use1 for us-east-1."""
    return _DIRECTIONS.sub(lambda found: found[0][0], region).replace("-", "")


def _of_google(zone: str) -> bool:
    return re.fullmatch(r"[a-z]+-[a-z]+\d+-[a-z]", zone) is not None
