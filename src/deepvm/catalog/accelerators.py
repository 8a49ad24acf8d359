"""What the accelerators are, from their makers' data sheets: 16-bit arithmetic, size and rate of memory.

Names are those that SkyPilot's catalogues use; the makers' and the clouds' spellings are aliases. A row is
one GPU as the operating system counts them: half of a K80 or M60 card, a quarter of an A16.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from deepvm.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Accelerator:
    """``tflops_16bit`` is dense BF16 or FP16 that sums up in FP32, as training does: tensor cores where they
    exist, no sparsity, and the better of FP16 and FP32 on GPUs from before tensor cores.
    """

    name: str
    tflops_16bit: float
    memory_gib: float
    memory_gbytes_per_s: float
    aliases: tuple[str, ...] = ()
    marketed_gb: float = 0.0  # the size that it is sold by; its memory's, where none is given

    def __post_init__(self) -> None:
        if not _key(self.name):
            raise UsageError(f"an accelerator is called {self.name!r}: a name needs letters or digits")
        for what in ("tflops_16bit", "memory_gib", "memory_gbytes_per_s"):
            value = getattr(self, what)
            if not (math.isfinite(value) and value > 0):
                raise UsageError(f"{self.name}: {what} is {value}, it must be above zero")
        if not self.marketed_gb:
            object.__setattr__(self, "marketed_gb", self.memory_gib)


_MAKERS = re.compile(r"(?:nvidia|amd|tesla|geforce|quadro|instinct)[\s_-]*")
_SEPARATORS = re.compile(r"[^a-z0-9]+")
_GIGABYTES = re.compile(r"(?<=[\s_-])(\d+)g(?=$|[\s_-])")


def _key(name: str) -> str:
    """``NVIDIA GeForce RTX 4090``, ``rtx-4090`` and ``RTX4090`` are one name, ``H100-80G`` and ``H100-80GB`` too."""
    return _SEPARATORS.sub("", _GIGABYTES.sub(r"\1gb", _MAKERS.sub("", name.lower())))


def _gpu(
    name: str,
    tflops_16bit: float,
    memory_gib: float,
    memory_gbytes_per_s: float,
    *aliases: str,
    marketed_gb: float = 0.0,
) -> Accelerator:
    return Accelerator(
        name=name,
        tflops_16bit=tflops_16bit,
        memory_gib=memory_gib,
        memory_gbytes_per_s=memory_gbytes_per_s,
        aliases=aliases,
        marketed_gb=marketed_gb,
    )


#: name, dense 16-bit TFLOPS, GiB, GB/s, aliases. GeForce cards sum up in FP32 at half the rate of their
#: advertised FP16 figure, so their rows show half of it.
ACCELERATORS: tuple[Accelerator, ...] = (
    # Before tensor cores
    _gpu("K520", 2.46, 4, 160, "GRID K520"),
    _gpu("K80", 4.37, 12, 240),
    _gpu("M60", 4.83, 8, 160),
    _gpu("M4000", 2.57, 8, 192),
    _gpu("P4", 5.5, 8, 192),
    _gpu("P4000", 5.3, 8, 243),
    _gpu("P40", 11.8, 24, 346),
    _gpu("P100", 18.7, 16, 732, "P100-PCIE-16GB"),
    # Data centre, Volta to Ada
    _gpu("V100", 125, 16, 900, "V100-16GB", "V100-SXM2-16GB"),
    _gpu("V100-32GB", 125, 32, 900, "V100-SXM2-32GB", "V100-SXM3-32GB"),
    _gpu("T4", 65, 16, 320),
    _gpu("T4g", 65, 16, 320),
    _gpu("A2", 18, 16, 200),
    _gpu("A10", 125, 24, 600),
    _gpu("A10G", 70, 24, 600),  # AWS's own variant: the cores of an A10, a lower tensor rate
    _gpu("A16", 17.9, 16, 200),
    _gpu("A30", 165, 24, 933),
    _gpu("A40", 149.7, 48, 696),
    _gpu("A100", 312, 40, 1555, "A100-40GB", "A100-SXM4-40GB", "A100-PCIE-40GB"),
    _gpu("A100-80GB", 312, 80, 2039, "A100-80GB-SXM", "A100-SXM4-80GB", "A100-SXM-80GB"),
    _gpu("A100-80GB-PCIe", 312, 80, 1935, "A100-PCIE-80GB", "A100-80GB-PCIe-NVLink"),
    _gpu("L4", 121, 24, 300),
    _gpu("L40", 181, 48, 864),
    _gpu("L40S", 362, 48, 864),
    # Data centre, Hopper and Blackwell
    _gpu(
        "H100",
        989,
        80,
        3350,
        "H100-80GB",
        "H100-SXM",
        "H100-SXM5",
        "H100-80GB-SXM",
        "H100-80GB-SXM5",
        "H100-NVLINK",
        "H100-MEGA",
        "H100-MEGA-80GB",
        "H100 80GB HBM3",
    ),
    _gpu("H100-PCIe", 756, 80, 2039, "H100-80GB-PCIe", "H100-80GB-PCIe-NVLink"),
    _gpu("H100-NVL", 835, 94, 3938),
    _gpu("H200", 989, 141, 4800, "H200-SXM", "H200-141GB"),
    _gpu("GH200", 989, 96, 4000, "GH200-96GB", "GH200-480GB"),  # 480 GB is the memory of its CPU
    _gpu("B200", 2250, 179, 8000, "B200-SXM", "B200-180GB", marketed_gb=192),
    _gpu("GB200", 2500, 186, 8000, marketed_gb=192),
    _gpu("B300", 2250, 268, 8000, "B300-SXM", "B300-288GB", marketed_gb=288),
    _gpu("GB300", 2500, 278, 8000, marketed_gb=288),
    # Workstation
    _gpu("RTX6000", 130.5, 24, 672),  # the Quadro of the Turing generation
    _gpu("RTX8000", 130.5, 48, 672),
    _gpu("RTXA4000", 76.7, 16, 448, "A4000"),
    _gpu("RTXA4500", 94.6, 20, 640, "A4500"),
    _gpu("RTXA5000", 111.1, 24, 768, "A5000"),
    _gpu("RTXA6000", 154.8, 48, 768, "A6000"),
    _gpu("RTX2000-Ada", 48, 16, 224, "RTX 2000 Ada Generation"),
    _gpu("RTX4000-Ada", 106.9, 20, 360, "RTX 4000 Ada Generation"),
    _gpu("RTX5000-Ada", 261.1, 32, 576, "RTX 5000 Ada Generation"),
    _gpu("RTX5880-Ada", 277, 48, 960, "RTX 5880 Ada Generation"),
    _gpu("RTX6000-Ada", 364.2, 48, 960, "RTX 6000 Ada Generation"),
    _gpu("RTXPRO4000", 147, 24, 672, "RTX PRO 4000 Blackwell"),
    _gpu("RTXPRO4500", 211, 32, 896, "RTX PRO 4500 Blackwell", "RTXPRO4500-SE"),
    _gpu("RTXPRO5000", 258, 48, 1344, "RTX PRO 5000 Blackwell"),
    _gpu(
        "RTXPRO6000",
        500,
        96,
        1597,
        "RTXPRO6000S",
        "RTX PRO 6000 Blackwell Server Edition",
        "RTX PRO Server 6000",
        "RTX PRO 6000 96GB",
        "RTX PRO 6000 CC",
    ),
    _gpu("RTXPRO6000WS", 503.8, 96, 1792, "RTXPRO6000-WK", "RTX PRO 6000 Blackwell Workstation Edition"),
    # Consumer
    _gpu("RTX2080Ti", 53.8, 11, 616),
    _gpu("RTX3070", 40.6, 8, 448),
    _gpu("RTX3080", 59.5, 10, 760),
    _gpu("RTX3090", 71, 24, 936),
    _gpu("RTX4080", 97.5, 16, 717),
    _gpu("RTX4090", 165.2, 24, 1008),
    _gpu("RTX5080", 112.6, 16, 960),
    _gpu("RTX5090", 209.5, 32, 1792),
    # AMD
    _gpu("Radeon MI25", 24.6, 16, 484, "MI25", "Radeon Instinct MI25"),
    _gpu("Radeon Pro V520", 14.7, 8, 512, "V520"),
    _gpu("MI100", 184.6, 32, 1229),
    _gpu("MI210", 181, 64, 1638),
    _gpu("MI250", 362.1, 128, 3277),
    _gpu("MI250X", 383, 128, 3277),
    _gpu("MI300X", 1307, 192, 5300),
    _gpu("MI325X", 1307, 256, 6000),
    _gpu("MI350X", 2307, 288, 8000),
    _gpu("MI355X", 2517, 288, 8000),
)


@cache
def _by_key() -> Mapping[str, Accelerator]:
    return {_key(name): gpu for gpu in ACCELERATORS for name in (gpu.name, *gpu.aliases)}


def find(name: str) -> Accelerator | None:
    """By its name or an alias, in any case and with or without its maker; None where nobody knows it."""
    return _by_key().get(_key(name))


# Clouds call these by the first name too; only their memory tells them apart.
_NAMESAKES = {"A100": "A100-80GB", "V100": "V100-32GB", "H100": "H100-NVL", "RTX6000": "RTXPRO6000"}


def of_size(gpu: Accelerator, memory_gib: float) -> Accelerator | None:
    """The accelerator, or its namesake, that has this much memory; None where neither has."""
    namesake = _by_key()[_key(_NAMESAKES[gpu.name])] if gpu.name in _NAMESAKES else gpu
    return next((one for one in (gpu, namesake) if agrees(one.memory_gib, memory_gib)), None)


def agrees(table_gib: float, told_gib: float) -> bool:
    """Whether a size is the table's: clouds tell a little less, which error correction takes, or round up."""
    return 0.88 * table_gib <= told_gib <= 1.1 * table_gib


def spellings(asked: str, present: Iterable[str]) -> set[str]:
    """Those of the names present that mean the accelerator asked for."""
    gpu = find(asked)
    return {name for name in present if _key(name) == _key(asked) or (gpu is not None and find(name) is gpu)}
