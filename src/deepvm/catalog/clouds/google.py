"""Google Cloud's machines with GPUs: a host's name in; its GPUs, how many may join it, and its network out.

Google prices hosts and GPUs apart. The A and G series have a fixed number of GPUs; N1 hosts take T4, P4, P100 and V100.
The figures are those of Google's page on GPU machine types, as known in 2025.
"""

from __future__ import annotations

import re

# Series -> GPU.
_SERIES = {
    "a2-highgpu": "A100",
    "a2-megagpu": "A100",
    "a2-ultragpu": "A100-80GB",
    "a3-highgpu": "H100",
    "a3-megagpu": "H100-MEGA",
    "a3-ultragpu": "H200",
    "a4-highgpu": "B200",
}
_COUNTED = re.compile(r"(a\d-[a-z]+gpu)-(\d+)g$")
# Machine -> GPUs, of a series whose names count vCPUs.
_G2 = {4: 1, 8: 1, 12: 1, 16: 1, 32: 1, 24: 2, 48: 4, 96: 8}
_G4 = {48: 1, 96: 2, 192: 4, 384: 8}

# GPU -> number of GPUs -> most vCPUs of an N1 host.
_N1_MOST_VCPUS = {
    "T4": {1: 48, 2: 48, 4: 96},
    "P4": {1: 24, 2: 48, 4: 96},
    "P100": {1: 16, 2: 32, 4: 64},
    "V100": {1: 12, 2: 24, 4: 48, 8: 96},
}
_N1 = re.compile(r"n1-(?:standard|highmem)-(\d+)$")

# Gbit/s that a machine sends over its ordinary network cards. A3 and A4 have faster ones for GPUs alone, which need
# Google's own plug-ins for NCCL.
_GBPS = {
    **{f"a2-{kind}gpu-{n}g": gbps for kind in ("high", "ultra") for n, gbps in ((1, 24), (2, 32), (4, 50), (8, 100))},
    "a2-megagpu-16g": 100,
    "a3-highgpu-1g": 25,
    "a3-highgpu-2g": 50,
    "a3-highgpu-4g": 100,
    "a3-highgpu-8g": 200,
    "a3-megagpu-8g": 200,
    "a3-ultragpu-8g": 400,
    "a4-highgpu-8g": 400,
    **{f"g2-standard-{n}": gbps for n, gbps in ((4, 10), (8, 16), (12, 16), (16, 32), (24, 32), (32, 32))},
    "g2-standard-48": 50,
    "g2-standard-96": 100,
    **{f"g4-standard-{n}": gbps for n, gbps in ((48, 50), (96, 100), (192, 200), (384, 400))},
}  # fmt: skip


def fixed_gpus(host: str) -> tuple[str, int] | None:
    """Return the GPU and its number that belong to a host of the A and G series; None for other hosts."""
    counted = _COUNTED.match(host)
    if counted and counted[1] in _SERIES:
        return _SERIES[counted[1]], int(counted[2])
    series, _, vcpus = host.rpartition("-")
    by_vcpus = {"g2-standard": ("L4", _G2), "g4-standard": ("RTXPRO6000", _G4)}.get(series)
    if by_vcpus and vcpus.isdigit() and int(vcpus) in by_vcpus[1]:
        return by_vcpus[0], by_vcpus[1][int(vcpus)]
    return None


def hosts_gpus(host: str, gpu: str, count: int) -> bool:
    """True if an N1 host may have these GPUs, and has at least four vCPUs for each."""
    match = _N1.match(host)
    most = _N1_MOST_VCPUS.get(gpu, {}).get(count)
    return match is not None and most is not None and 4 * count <= int(match[1]) <= most


def needs_gpus(host: str) -> bool:
    """True for a host that is sold with GPUs only: its price alone is half of a machine's."""
    return re.match(r"(a[234]x?|g[24])-", host) is not None


def sustained_gbps(host: str) -> float | None:
    """Return the bandwidth of a host with GPUs; None if it is not known."""
    n1 = _N1.match(host)
    if n1:
        vcpus = int(n1[1])
        return float(min(2 * vcpus, 10 if vcpus < 8 else 16 if vcpus < 16 else 32))
    return None if host not in _GBPS else float(_GBPS[host])
