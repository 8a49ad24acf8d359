"""The network of EC2 types by name: a name and vCPUs in, sustained Gbit/s and whether it has EFA out.

Burstable and accelerated types have EC2's documented figures. For the rest, a family's lowest rate per vCPU applies, up
to the bandwidth of its middle sizes: never above what EC2 sustains. No requests.
"""

from __future__ import annotations

import re
from functools import lru_cache

_BURSTABLE = {
    "nano": 0.032,
    "micro": 0.064,
    "small": 0.128,
    "medium": 0.256,
    "large": 0.512,
    "xlarge": 1.024,
    "2xlarge": 2.048,
}

# Series -> Gbit/s by size, all network cards added up: EFA machines have several.
_BY_SIZE: dict[str, dict[str, float]] = {
    "t1": {"micro": 0.064},
    "t2": {**_BURSTABLE, "xlarge": 0.75, "2xlarge": 1.0},
    "g3s": {"xlarge": 1.25},
    "g3": {"4xlarge": 5, "8xlarge": 10, "16xlarge": 25},
    "g4ad": {"xlarge": 2, "2xlarge": 4.167, "4xlarge": 8.333, "8xlarge": 15, "16xlarge": 25},
    "g4dn": {"xlarge": 5, "2xlarge": 10, "4xlarge": 20, "8xlarge": 50, "12xlarge": 50, "16xlarge": 50, "metal": 100},
    "g5": {"xlarge": 2.5, "2xlarge": 5, "4xlarge": 10, "8xlarge": 25, "12xlarge": 40, "16xlarge": 25, "24xlarge": 50,
           "48xlarge": 100},
    "g5g": {"xlarge": 1.25, "2xlarge": 2.5, "4xlarge": 5, "8xlarge": 12, "16xlarge": 25, "metal": 25},
    "g6": {"xlarge": 2.5, "2xlarge": 5, "4xlarge": 10, "8xlarge": 25, "12xlarge": 40, "16xlarge": 25, "24xlarge": 50,
           "48xlarge": 100},
    "g6e": {"xlarge": 2.5, "2xlarge": 5, "4xlarge": 20, "8xlarge": 25, "12xlarge": 100, "16xlarge": 35, "24xlarge": 200,
            "48xlarge": 400},
    "g6f": {"large": 1.5, "xlarge": 2.5, "2xlarge": 5, "4xlarge": 10},
    "gr6": {"4xlarge": 10, "8xlarge": 25},
    "gr6f": {"4xlarge": 10},
    "g7": {"2xlarge": 40, "4xlarge": 80, "8xlarge": 100, "12xlarge": 175, "24xlarge": 350, "48xlarge": 700},
    "g7e": {"2xlarge": 50, "4xlarge": 50, "8xlarge": 100, "12xlarge": 400, "24xlarge": 800, "48xlarge": 1600},
    "p2": {"xlarge": 1.25, "8xlarge": 10, "16xlarge": 25},
    "p3": {"2xlarge": 2.5, "8xlarge": 10, "16xlarge": 25},
    "p3dn": {"24xlarge": 100},
    "p4d": {"24xlarge": 400},
    "p4de": {"24xlarge": 400},
    "p5": {"4xlarge": 100, "48xlarge": 3200},
    "p5e": {"48xlarge": 3200},
    "p5en": {"48xlarge": 3200},
    "p6-b200": {"48xlarge": 1600},
    "p6-b300": {"48xlarge": 6400},
    "dl1": {"24xlarge": 400},
    "trn1": {"2xlarge": 3.125, "32xlarge": 800},
    "trn1n": {"32xlarge": 1600},
    "trn2": {"3xlarge": 50, "48xlarge": 3200},
    "trn2u": {"48xlarge": 3200},
    "inf1": {"xlarge": 5, "2xlarge": 5, "6xlarge": 25, "24xlarge": 100},
    "inf2": {"xlarge": 2.083, "8xlarge": 16.667, "24xlarge": 50, "48xlarge": 100},
}  # fmt: skip

# Series -> Gbit/s per vCPU and at most; the first that fits counts.
_PER_VCPU: tuple[tuple[re.Pattern[str], float, float], ...] = tuple(
    (re.compile(series), rate, most)
    for series, rate, most in (
        (r"[cmr]\d\w*-flex$", 0.195, 15),
        (r"(c7|[cmr]8)gn$", 3.125, 600),
        (r"[cmr]8gb$", 2.08, 400),
        (r"[cmr]8(i|id|a)b$", 1.04, 400),
        (r"[cmr](6i|6id|8i|8id)n$|[cm]8ine$|im4gn$|is4gen$", 1.56, 600),
        (r"c6gn$|d3en$", 1.5, 100),
        (r"c5n$|m5zn$|x2iezn$", 0.93, 100),
        (r"[mr]5d?n$|x2idn$", 0.78, 100),
        (r"d3$", 0.75, 25),
        (r"i(7i|8g)e$", 0.5, 100),
        (r"i3en$", 1.04, 100),
        (r"[cmrx][78](g|gd|i|id|a)$", 0.39, 40),
        (r"[cmr]9gd?$|x2iedn$|i[478](g|i)$", 0.39, 75),
        (r"[cmr][67]\w*$|x8\w+$", 0.26, 50),
        (r"(a1|i3|r4|h1|z1d|x2gd)$", 0.31, 25),
        (r"([cmr]5d?|r5b|d2|c4)$", 0.25, 25),
        (r"[cmr]5", 0.18, 20),
        (r"hpc", 100, 100),
        (r"m8azn$", 2.08, 200),
        (r"f2$", 0.5, 100),
    )
)
_ANY = 0.1  # old generations and unknown types: m4.4xlarge sustains 2 Gbit/s with 16 vCPUs
_MOST = 25.0


# Series -> sizes with an Elastic Fabric Adapter, as eksctl lists them (instance_types.go, 2026-08); g4dn.metal and dl1
# are from EC2's own list.
_LARGE = ("8xlarge", "12xlarge", "16xlarge", "24xlarge", "48xlarge")
_EFA: dict[str, tuple[str, ...]] = {
    "g4dn": (*_LARGE, "metal"),
    **dict.fromkeys(("g5", "g6", "g6e", "g7", "g7e", "gr6"), _LARGE),
    **dict.fromkeys(("p3dn", "p4d", "p4de", "dl1", "inf1"), ("24xlarge",)),
    "p5": ("4xlarge", "48xlarge"),
    **dict.fromkeys(("p5e", "p5en", "p6-b200", "p6-b300", "trn2", "trn2u"), ("48xlarge",)),
    **dict.fromkeys(("trn1", "trn1n"), ("32xlarge",)),
}


def has_efa(instance: str) -> bool:
    """True if an accelerated EC2 type has an Elastic Fabric Adapter."""
    series, _, size = instance.lower().partition(".")
    return size in _EFA.get(series, ())


@lru_cache(maxsize=4096)
def sustained_by_family(instance: str, vcpus: float | None) -> float | None:
    """Return the bandwidth in Gbit/s after a burst; None if it needs the number of vCPUs."""
    series, _, size = instance.lower().partition(".")
    by_size = _BURSTABLE if re.match(r"t\d", series) and series not in _BY_SIZE else _BY_SIZE.get(series, {})
    if size in by_size:
        return by_size[size]
    if vcpus is None:
        return None
    for pattern, rate, most in _PER_VCPU:
        if pattern.match(series):
            return min(rate * vcpus, most)
    return min(_ANY * vcpus, _MOST)
