"""On-demand prices for traces that have none: an accelerator and a zone in, USD an hour of one machine out.

List prices, looked up on 2026-08-22 (AWS, us-east-1) or published by the cloud before a type was retired. A user's own
price replaces them.
"""

from __future__ import annotations

import re

SPOT_SHARE = 0.4  # of the on-demand price, where a trace has no spot prices either

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


def on_demand_usd(accelerator: str | None, count: int, zone: str) -> float | None:
    """Return the price of a machine with ``count`` accelerators; None if it is unknown."""
    name = (accelerator or "").upper()
    if name in _MACHINES:
        return _MACHINES[name]
    google = re.fullmatch(r"[a-z]+-[a-z]+\d+-[a-z]", zone) is not None
    each = (_GOOGLE if google else _AWS).get(name)
    return None if each is None else each * count
