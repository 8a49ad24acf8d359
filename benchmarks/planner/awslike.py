"""A catalogue as large and as awkward as the whole of AWS, in SkyPilot's CSV format, from a seed.

Names and sizes are those of real types; prices, and which type is offered where, are chance.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COLUMNS = (
    "InstanceType", "AcceleratorName", "AcceleratorCount", "vCPUs", "MemoryGiB", "GpuInfo", "Price", "SpotPrice",
    "Region", "AvailabilityZone", "Arch",
)  # fmt: skip
TYPES, GPU_TYPES, ROWS = 1372, 85, 54_000
# Region -> zones: 22 regions, 74 zones.
REGIONS = {
    "us-east-1": "abcdef", "us-east-2": "abc", "us-west-1": "ab", "us-west-2": "abcd", "ca-central-1": "abcd",
    "ca-west-1": "abc", "sa-east-1": "abc", "eu-west-1": "abc", "eu-west-2": "abc", "eu-west-3": "abc",
    "eu-central-1": "abc", "eu-central-2": "abc", "eu-north-1": "abc", "eu-south-1": "abc", "ap-south-1": "abc",
    "ap-northeast-1": "acd", "ap-northeast-2": "abcd", "ap-northeast-3": "abc", "ap-southeast-1": "abc",
    "ap-southeast-2": "abc", "ap-southeast-3": "abc", "ap-east-1": "abcdef",
}  # fmt: skip
# Series -> GiB of memory a vCPU. Those whose name has a g behind the generation are Arm.
SERIES = {
    **dict.fromkeys(
        ("c4", "c5", "c5a", "c5ad", "c5d", "c5n", "c6a", "c6g", "c6gd", "c6gn", "c6i", "c6id", "c6in", "c7a", "c7g",
         "c7gd", "c7gn", "c7i", "c8g", "c8gd", "c8gn", "c8i"), 2.0),
    **dict.fromkeys(
        ("m4", "m5", "m5a", "m5ad", "m5d", "m5dn", "m5n", "m5zn", "m6a", "m6g", "m6gd", "m6i", "m6id", "m6idn", "m6in",
         "m7a", "m7g", "m7gd", "m7i", "m8g", "m8gd", "m8i", "t2", "t3", "t3a", "t4g"), 4.0),
    **dict.fromkeys(
        ("r4", "r5", "r5a", "r5ad", "r5b", "r5d", "r5dn", "r5n", "r6a", "r6g", "r6gd", "r6i", "r6id", "r6idn", "r6in",
         "r7a", "r7g", "r7gd", "r7i", "r7iz", "r8g", "r8gd", "r8i", "z1d", "i3", "i3en", "i4g", "i4i", "i7i", "i7ie",
         "i8g", "d2", "d3", "d3en", "h1", "im4gn", "is4gen"), 8.0),
    **dict.fromkeys(("x1", "x1e", "x2gd", "x2idn", "x2iedn", "x2iezn", "x8g", "u7i-6tb", "u7i-12tb"), 16.0),
}  # fmt: skip
SIZES = {
    "large": 2, "xlarge": 4, "2xlarge": 8, "3xlarge": 12, "4xlarge": 16, "6xlarge": 24, "8xlarge": 32, "9xlarge": 36,
    "12xlarge": 48, "16xlarge": 64, "18xlarge": 72, "24xlarge": 96, "32xlarge": 128, "48xlarge": 192, "metal": 96,
}  # fmt: skip
# Accelerator, its MiB (0 where nobody says), USD/h of one with its share of the host; then types: count, vCPUs, GiB.
GPUS: tuple[tuple[str, int, float, dict[str, tuple[float, int, float]]], ...] = (
    ("K80", 12288, 0.9, {"p2.xlarge": (1, 4, 61), "p2.8xlarge": (8, 32, 488), "p2.16xlarge": (16, 64, 732)}),
    ("M60", 8192, 0.9, {"g3s.xlarge": (1, 4, 30.5), "g3.4xlarge": (1, 16, 122), "g3.8xlarge": (2, 32, 244),
                        "g3.16xlarge": (4, 64, 488)}),
    ("V100", 16384, 3.06, {"p3.2xlarge": (1, 8, 61), "p3.8xlarge": (4, 32, 244), "p3.16xlarge": (8, 64, 488)}),
    ("V100-32GB", 32768, 3.9, {"p3dn.24xlarge": (8, 96, 768)}),
    ("T4", 16384, 0.5, {"g4dn.xlarge": (1, 4, 16), "g4dn.2xlarge": (1, 8, 32), "g4dn.4xlarge": (1, 16, 64),
                        "g4dn.8xlarge": (1, 32, 128), "g4dn.12xlarge": (4, 48, 192), "g4dn.16xlarge": (1, 64, 256),
                        "g4dn.metal": (8, 96, 384)}),
    ("Radeon Pro V520", 8192, 0.4, {"g4ad.xlarge": (1, 4, 16), "g4ad.2xlarge": (1, 8, 32), "g4ad.4xlarge": (1, 16, 64),
                                    "g4ad.8xlarge": (2, 32, 128), "g4ad.16xlarge": (4, 64, 256)}),
    ("T4g", 16384, 0.42, {"g5g.xlarge": (1, 4, 8), "g5g.2xlarge": (1, 8, 16), "g5g.4xlarge": (1, 16, 32),
                          "g5g.8xlarge": (1, 32, 64), "g5g.16xlarge": (2, 64, 128), "g5g.metal": (2, 64, 128)}),
    ("A10G", 24576, 1.0, {"g5.xlarge": (1, 4, 16), "g5.2xlarge": (1, 8, 32), "g5.4xlarge": (1, 16, 64),
                          "g5.8xlarge": (1, 32, 128), "g5.12xlarge": (4, 48, 192), "g5.16xlarge": (1, 64, 256),
                          "g5.24xlarge": (4, 96, 384), "g5.48xlarge": (8, 192, 768)}),
    ("L4", 22888, 0.8, {"g6.xlarge": (1, 4, 16), "g6.2xlarge": (1, 8, 32), "g6.4xlarge": (1, 16, 64),
                        "g6.8xlarge": (1, 32, 128), "g6.12xlarge": (4, 48, 192), "g6.16xlarge": (1, 64, 256),
                        "g6.24xlarge": (4, 96, 384), "g6.48xlarge": (8, 192, 768), "gr6.4xlarge": (1, 16, 128),
                        "gr6.8xlarge": (1, 32, 256), "g6f.large": (0.125, 2, 8), "g6f.xlarge": (0.125, 4, 16),
                        "g6f.2xlarge": (0.25, 8, 32), "g6f.4xlarge": (0.5, 16, 64), "gr6f.4xlarge": (0.5, 16, 128)}),
    ("L40S", 45776, 1.86, {"g6e.xlarge": (1, 4, 32), "g6e.2xlarge": (1, 8, 64), "g6e.4xlarge": (1, 16, 128),
                           "g6e.8xlarge": (1, 32, 256), "g6e.12xlarge": (4, 48, 384), "g6e.16xlarge": (1, 64, 512),
                           "g6e.24xlarge": (4, 96, 768), "g6e.48xlarge": (8, 192, 1536)}),
    ("RTXPRO6000", 97887, 2.9, {"g7e.2xlarge": (1, 8, 64), "g7e.4xlarge": (1, 16, 128), "g7e.8xlarge": (1, 32, 256),
                                "g7e.12xlarge": (2, 48, 512), "g7e.24xlarge": (4, 96, 1024),
                                "g7e.48xlarge": (8, 192, 2048)}),
    ("A100", 40960, 4.1, {"p4d.24xlarge": (8, 96, 1152)}),
    ("A100-80GB", 81920, 5.1, {"p4de.24xlarge": (8, 96, 1152)}),
    ("H100", 81920, 6.9, {"p5.4xlarge": (1, 16, 256), "p5.48xlarge": (8, 192, 2048)}),
    ("H200", 144384, 7.9, {"p5e.48xlarge": (8, 192, 2048), "p5en.48xlarge": (8, 192, 2048)}),
    ("B200", 183296, 14.2, {"p6-b200.48xlarge": (8, 192, 2048)}),
    ("B300", 275000, 17.8, {"p6-b300.48xlarge": (8, 192, 4096)}),
    ("Inferentia", 8192, 0.23, {"inf1.xlarge": (1, 4, 8), "inf1.2xlarge": (1, 8, 16), "inf1.6xlarge": (4, 24, 48),
                              "inf1.24xlarge": (16, 96, 192)}),
    ("Inferentia2", 0, 0.76, {"inf2.xlarge": (1, 4, 16), "inf2.8xlarge": (1, 32, 128), "inf2.24xlarge": (6, 96, 384)}),
    ("Trainium", 32768, 1.34, {"trn1.2xlarge": (1, 8, 32), "trn1.32xlarge": (16, 128, 512)}),
    ("Gaudi HL-205", 32768, 1.64, {"dl1.24xlarge": (8, 96, 768)}),
    ("Qualcomm AI100", 0, 1.1, {"dl2q.24xlarge": (8, 96, 768)}),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Type:
    name: str
    accelerator: str
    count: float
    vcpus: int
    memory_gib: float
    gpu_info: str
    usd: float
    offered: float  # the share of regions that offer it


def write(path: Path, *, seed: int) -> int:
    """Write the CSV and return its number of rows."""
    chance = random.Random(seed)
    types = [*_gpu_types(chance), *_cpu_types(chance)]
    assert (len(types), sum(map(len, REGIONS.values())), len(REGIONS)) == (TYPES, 74, 22)
    count = 0
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for row in _rows(types, chance):
            writer.writerow(row)
            count += 1
    return count


def _rows(types: list[_Type], chance: random.Random) -> Iterator[tuple[object, ...]]:
    dearness = {region: 0.95 + 0.55 * chance.random() for region in REGIONS}
    # Each type is offered in one region for certain, and in the others by chance, so that about ROWS come out.
    others = (ROWS / sum(map(len, REGIONS.values())) * len(REGIONS) - len(types)) / (len(REGIONS) - 1)
    wanted = others / sum(t.offered for t in types)
    for t in types:
        home = chance.choice(list(REGIONS))
        arch = "arm64" if "g" in t.name.partition(".")[0][2:] and not t.accelerator else "x86_64"
        arch = "arm64" if t.name.startswith("g5g") else arch
        for region, zones in REGIONS.items():
            if region != home and chance.random() > t.offered * wanted:
                continue
            usd = round(t.usd * dearness[region], 4)
            for zone in zones:
                yield (
                    t.name, t.accelerator, t.count or "", t.vcpus, t.memory_gib, t.gpu_info,
                    "" if chance.random() < 0.003 else usd, _spot(usd, chance), region, region + zone, arch,
                )  # fmt: skip


def _spot(usd: float, chance: random.Random) -> float | str:
    """Mostly a quarter to three quarters of on-demand; sometimes absent, sometimes not below it at all."""
    kind = chance.random()
    if kind < 0.07:
        return ""
    return round(usd * (1 + 0.4 * chance.random() if kind < 0.09 else 0.25 + 0.5 * chance.random()), 4)


def _gpu_types(chance: random.Random) -> list[_Type]:
    found = []
    for accelerator, mib, usd, types in GPUS:
        for name, (count, vcpus, memory_gib) in types.items():
            info = {
                "Gpus": [{"Name": accelerator, "Count": count, "MemoryInfo": {"SizeInMiB": mib}}],
                "TotalGpuMemoryInMiB": int(mib * count),
            }
            found.append(
                _Type(
                    name=name, accelerator=accelerator, count=count, vcpus=vcpus, memory_gib=memory_gib,
                    gpu_info=str(info) if mib else "", usd=usd * count + 0.01 * vcpus,
                    offered=0.3 + 0.5 * chance.random(),
                )
            )  # fmt: skip
    assert len(found) == GPU_TYPES
    return found


def _cpu_types(chance: random.Random) -> list[_Type]:
    others = [(series, size) for series in SERIES for size in SIZES if (series, size) not in _ALWAYS]
    kept = [*_ALWAYS, *chance.sample(others, TYPES - GPU_TYPES - len(_ALWAYS))]
    return [
        _Type(
            name=f"{series}.{size}", accelerator="", count=0, gpu_info="",
            vcpus=SIZES[size], memory_gib=SIZES[size] * SERIES[series],
            usd=SIZES[size] * (0.03 + 0.006 * SERIES[series]) * (0.85 + 0.3 * chance.random()),
            offered=0.3 + 0.5 * chance.random(),
        )
        for series, size in kept
    ]  # fmt: skip


# Types whose bandwidth the built-in catalogue knows.
_ALWAYS = [
    ("c5", "xlarge"), ("c5", "2xlarge"), ("c5n", "xlarge"), ("c6in", "xlarge"), ("m6i", "xlarge"), ("r6i", "xlarge"),
    ("t3", "xlarge"), ("d3", "xlarge"),
]  # fmt: skip
