"""The accelerator of a SkyPilot row: the row's name and GpuInfo in; name, memory and flags out. For ``skypilot_types``.

Providers fill GpuInfo in differently: MiB of each GPU, GiB in a field of MiB, the sum over all GPUs, or nothing. A size
that agrees with the table of accelerators is kept: it is the usable part. Else the table decides, and a flag says why.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from deepvm.catalog import accelerators

NOT_GIVEN = "GPU memory missing (the table's is used)"
AS_SUM = "GPU memory is the sum over the GPUs (divided)"
IN_GIB = "GPU memory in GiB instead of MiB (converted)"
DISAGREES = "GPU memory disagrees with the table of accelerators (the table's is used)"
UNKNOWN = "memory of the accelerator unknown"
NAMESAKE = "accelerator named like another, identified by its memory"

_MAX_LITERAL = 4096  # characters of GpuInfo; the longest in use has 300
_SUMS = ("primeintellect", "vast")  # providers that state the sum over all GPUs
_OWN_NAMES = {("nebius", "RTX6000"): "RTXPRO6000"}  # Nebius has the Blackwell card of 96 GB alone
_PLAUSIBLE_GIB = (1.0, 1024.0)  # of one GPU that the table lacks


@dataclass(frozen=True, kw_only=True, slots=True)
class StatedMemory:
    """The sizes in a row's GpuInfo, both read as MiB."""

    size_gib: float | None = None
    total_gib: float | None = None

    def readings(self, provider: str, count: float) -> Iterator[tuple[tuple[str, ...], float]]:
        """Yield the possible GiB of one GPU, the likeliest first, each with the flags of its reading."""
        size_gib = self.size_gib
        if size_gib is None:
            return
        plain: tuple[tuple[str, ...], float] = ((), size_gib)
        summed = ((AS_SUM,), round(size_gib / count, 3))
        if count > 1 and (provider in _SUMS or size_gib == self.total_gib):
            yield from (summed, plain)
        else:
            yield from (plain, summed) if count > 1 else (plain,)
        yield (IN_GIB,), size_gib * 1024
        if count > 1:
            yield (IN_GIB, AS_SUM), size_gib * 1024 / count


@dataclass(frozen=True, kw_only=True, slots=True)
class RowGpu:
    """The accelerator of a row: its name, the memory of each, and the flags of the row."""

    name: str
    memory_gib: float | None
    flags: tuple[str, ...] = ()


def gpu_of(provider: str, name: str, count: float, gpu_info: str) -> RowGpu:
    """Find the accelerator that a row means. Its name changes only if the row's name means another."""
    stated = stated_memory(gpu_info)
    name = _OWN_NAMES.get((provider, name), name)
    known = accelerators.find(name)
    if known is None:  # the first reading that could be a GPU's
        low, high = _PLAUSIBLE_GIB
        for flags, gib in stated.readings(provider, count):
            if low <= gib <= high:
                return RowGpu(name=name, memory_gib=gib, flags=flags)
        return RowGpu(name=name, memory_gib=None, flags=(UNKNOWN,))
    table_gib = known.memory_gib * (1 if float(count).is_integer() else count)  # a slice has its share
    if stated.size_gib is None:
        return RowGpu(name=name, memory_gib=table_gib, flags=(NOT_GIVEN,))
    if table_gib != known.memory_gib:
        agrees = accelerators.agrees(table_gib, stated.size_gib)
        return RowGpu(
            name=name, memory_gib=stated.size_gib if agrees else table_gib, flags=() if agrees else (DISAGREES,)
        )
    for flags, gib in stated.readings(provider, count):
        found = accelerators.of_size(known, gib)
        if found is None:
            continue
        if found is not known:
            name, flags = found.name, (*flags, NAMESAKE)
        return RowGpu(name=name, memory_gib=found.memory_gib if flags else gib, flags=flags)
    return RowGpu(name=name, memory_gib=known.memory_gib, flags=(DISAGREES,))


@lru_cache(maxsize=4096)
def stated_memory(text: str) -> StatedMemory:
    """Parse GpuInfo, which is a Python literal or arbitrary text."""
    if not text or len(text) > _MAX_LITERAL:
        return StatedMemory()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of odd literals; this is only data
            info: Any = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return StatedMemory()
    try:
        size = info["Gpus"][0]["MemoryInfo"]["SizeInMiB"]
    except (TypeError, KeyError, IndexError):
        return StatedMemory()
    return StatedMemory(size_gib=_gib(size), total_gib=_gib(info.get("TotalGpuMemoryInMiB")))


def _gib(mib: Any) -> float | None:
    if isinstance(mib, bool) or not isinstance(mib, int | float) or not 0 < mib < 2**40:
        return None
    return round(mib / 1024, 6) or None
