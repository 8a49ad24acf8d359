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
_COUNTED = re.compile(r"(a\d-[a-z]+gpu)-(\d{1,2})g$")
# Series whose names count vCPUs -> GPU, and its number by vCPUs.
_BY_VCPUS = {
    "g2-standard": ("L4", {"4": 1, "8": 1, "12": 1, "16": 1, "32": 1, "24": 2, "48": 4, "96": 8}),
    "g4-standard": ("RTXPRO6000", {"48": 1, "96": 2, "192": 4, "384": 8}),
}

# GPU -> number of GPUs -> most vCPUs of an N1 host.
_N1_MOST_VCPUS = {
    "T4": {1: 48, 2: 48, 4: 96},
    "P4": {1: 24, 2: 48, 4: 96},
    "P100": {1: 16, 2: 32, 4: 64},
    "V100": {1: 12, 2: 24, 4: 48, 8: 96},
}
_N1 = re.compile(r"n1-standard-(\d{1,3})$")

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


def gpus_of(host: str) -> tuple[tuple[str, int], ...]:
    """Return each GPU and its number that a host may have: one choice for the A and G series, several for N1."""
    n1 = _N1.match(host)
    if n1:
        vcpus = int(n1[1])  # four to eight for each GPU, as jobs need
        return tuple(
            (gpu, count)
            for gpu, most in _N1_MOST_VCPUS.items()
            for count in most
            if 4 * count <= vcpus <= min(8 * count, most[count])
        )
    counted = _COUNTED.match(host)
    if counted and counted[1] in _SERIES:
        return ((_SERIES[counted[1]], int(counted[2])),)
    series, _, vcpus_text = host.rpartition("-")
    gpu, counts = _BY_VCPUS.get(series, ("", {}))
    count = counts.get(vcpus_text)
    return () if count is None else ((gpu, count),)


def needs_gpus(host: str) -> bool:
    """True for a host of the A and G series: its price alone is half of a machine's."""
    return re.match(r"(a[234]x?|g[24])-", host) is not None


def sustained_gbps(host: str) -> float | None:
    """Return the bandwidth of a host with GPUs; None if it is not known."""
    n1 = _N1.match(host)
    if n1:
        vcpus = int(n1[1])
        return float(min(2 * vcpus, 10 if vcpus < 8 else 16 if vcpus < 16 else 32))
    return None if host not in _GBPS else float(_GBPS[host])
