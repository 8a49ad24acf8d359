"""Accelerators by their data sheets: a name as clouds or people write it in, its figures out.

Importers, checks and the planner ask it. The rows are in ``data/accelerators.csv``, with what they mean.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal, cast, get_args

from deepvm.errors import UnknownName, UsageError

Link = Literal["nvlink", "infinity-fabric", "pcie"]
PCIE_3_GBYTES_PER_S = 32.0  # 16 lanes, both directions


@dataclass(frozen=True, kw_only=True, slots=True)
class Accelerator:
    """``tflops_16bit`` is dense BF16 or FP16 with FP32 accumulation; ``marketed_gb`` is the size that it is sold by.

    ``link`` joins the GPUs of one machine. Its bandwidth is one GPU's, both directions added, as in data sheets."""

    name: str
    tflops_16bit: float
    memory_gib: float
    memory_gbytes_per_s: float
    marketed_gb: float
    link: Link = "pcie"
    link_gbytes_per_s: float = PCIE_3_GBYTES_PER_S
    aliases: tuple[str, ...] = ()
    maker: str = "nvidia"
    pytorch: bool = True  # False if today's builds of PyTorch have no kernels for it

    def __post_init__(self) -> None:
        if not _key(self.name):
            raise UsageError(f"accelerator name {self.name!r} is not valid: it needs letters or digits")
        if self.link not in get_args(Link):
            raise UsageError(f"{self.name}: link is {self.link!r}, it must be one of {', '.join(get_args(Link))}")
        for what in ("tflops_16bit", "memory_gib", "memory_gbytes_per_s", "marketed_gb", "link_gbytes_per_s"):
            value = getattr(self, what)
            if not (math.isfinite(value) and value > 0):
                raise UsageError(f"{self.name}: {what} is {value}, it must be above zero")


_MAKERS = re.compile(r"(?:nvidia|amd|tesla|geforce|quadro|instinct)[\s_-]*")
_SEPARATORS = re.compile(r"[^a-z0-9]+")
_GIGABYTES = re.compile(r"(?<=[\s_-])(\d+)g(?=$|[\s_-])")


def _key(name: str) -> str:
    """Normalise a name: ``NVIDIA GeForce RTX 4090`` and ``rtx-4090`` are one, ``H100-80G`` and ``H100-80GB`` too."""
    return _SEPARATORS.sub("", _GIGABYTES.sub(r"\1gb", _MAKERS.sub("", name.lower())))


@cache
def all_accelerators() -> tuple[Accelerator, ...]:
    """Read the table."""
    text = (resources.files("deepvm.catalog") / "data" / "accelerators.csv").read_text(encoding="utf-8")
    rows = csv.DictReader((line for line in text.splitlines() if not line.startswith("#")), restval="")
    return tuple(
        Accelerator(
            name=row["name"],
            tflops_16bit=float(row["tflops_16bit"]),
            memory_gib=float(row["memory_gib"]),
            memory_gbytes_per_s=float(row["memory_gbytes_per_s"]),
            marketed_gb=float(row["marketed_gb"] or row["memory_gib"]),
            link=cast(Link, row["link"]),
            link_gbytes_per_s=float(row["link_gbytes_per_s"]),
            aliases=tuple(filter(None, row["aliases"].split("|"))),
            maker=row["maker"] or "nvidia",
            pytorch=row["pytorch"] != "no",
        )
        for row in rows
    )


@cache
def _by_key() -> Mapping[str, Accelerator]:
    return {_key(name): gpu for gpu in all_accelerators() for name in (gpu.name, *gpu.aliases)}


def find(name: str) -> Accelerator | None:
    """Find by name or alias, in any case and with or without the maker; None if unknown."""
    return _by_key().get(_key(name))


# Clouds use the first name for both; only the memory differs.
_NAMESAKES = {"A100": "A100-80GB", "V100": "V100-32GB", "H100": "H100-NVL", "RTX6000": "RTXPRO6000"}


def of_size(gpu: Accelerator, memory_gib: float) -> Accelerator | None:
    """Return the accelerator, or its namesake, that has this much memory; None if neither has."""
    namesake = _by_key()[_key(_NAMESAKES[gpu.name])] if gpu.name in _NAMESAKES else gpu
    return next((one for one in (gpu, namesake) if agrees(one.memory_gib, memory_gib)), None)


def agrees(table_gib: float, stated_gib: float) -> bool:
    """True if a stated size is the table's: clouds subtract error correction, or round up."""
    return 0.88 * table_gib <= stated_gib <= 1.1 * table_gib


# Accelerators that the table lacks, by how clouds name them.
_OTHER_MAKERS = {
    "amd": re.compile(r"radeon|instinct|mi\d"),
    "intel": re.compile(r"gaudi|hl-?\d|habana"),
    "aws": re.compile(r"trainium|inferentia"),
    "google": re.compile(r"tpu"),
}


def maker_of(name: str) -> str | None:
    """Return who makes an accelerator; None if neither the table nor its name shows it."""
    gpu = find(name)
    if gpu is not None:
        return gpu.maker
    return next((maker for maker, pattern in _OTHER_MAKERS.items() if pattern.match(name.lower())), None)


def makers() -> tuple[str, ...]:
    return tuple(sorted({gpu.maker for gpu in all_accelerators()} | _OTHER_MAKERS.keys()))


def spellings(asked: str, present: Iterable[str]) -> set[str]:
    """Return those of the names present that mean the accelerator asked for. UnknownName if none does."""
    gpu = find(asked)
    found = {name for name in present if _key(name) == _key(asked) or (gpu is not None and find(name) is gpu)}
    if not found:
        raise UnknownName("GPU of this catalogue", asked, present)
    return found
