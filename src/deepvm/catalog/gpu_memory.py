"""The accelerator of a SkyPilot row and its memory: what the row says, judged by the table of accelerators.

Providers fill the field in differently: MiB of each GPU, GiB in a field of MiB, the sum over all GPUs, or nothing. A
size that agrees with the table is kept, since it is what is left to use; else the table decides, and a flag says why.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from deepvm.catalog import accelerators

NOT_GIVEN = "GPU memory not given (the table's is taken)"
AS_SUM = "GPU memory given as the sum over the GPUs (divided)"
IN_GIB = "GPU memory given in GiB where MiB belong (converted)"
DISAGREES = "GPU memory disagrees with the table of accelerators (the table's is taken)"
UNKNOWN = "memory of the accelerator unknown"
NAMESAKE = "accelerator named like another, told by its memory"

_MAX_LITERAL = 4096  # characters of GpuInfo; the longest in use has 300
_SUMS = ("primeintellect", "vast")  # providers whose size is known to be of all GPUs together
_OWN_NAMES = {("nebius", "RTX6000"): "RTXPRO6000"}  # Nebius has the Blackwell card of 96 GB alone
_PLAUSIBLE_GIB = (1.0, 1024.0)  # of one GPU that nobody knows


@dataclass(frozen=True, kw_only=True, slots=True)
class StatedMemory:
    """What a row's GpuInfo says, both as if in MiB."""

    size_gib: float | None = None
    total_gib: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """What an accelerator is called, the memory of each, and the flags of the row that says so."""

    name: str
    memory_gib: float | None
    flags: tuple[str, ...] = ()


def gpu_of(provider: str, name: str, count: float, gpu_info: str) -> Gpu:
    """The accelerator that a row means. Its name changes only where the row's name means another."""
    told = told_by(gpu_info)
    name = _OWN_NAMES.get((provider, name), name)
    known = accelerators.find(name)
    if known is None:
        return _unknown(provider, name, count, told)
    if not float(count).is_integer():
        return _slice(known, name, count, told)
    if told.size_gib is None:
        return Gpu(name=name, memory_gib=known.memory_gib, flags=(NOT_GIVEN,))
    for flags, gib in _readings(provider, told.size_gib, told.total_gib, count):
        found = accelerators.of_size(known, gib)
        if found is None:
            continue
        if found is not known:
            name, flags = found.name, (*flags, NAMESAKE)
        return Gpu(name=name, memory_gib=found.memory_gib if flags else gib, flags=flags)
    return Gpu(name=name, memory_gib=known.memory_gib, flags=(DISAGREES,))


def _slice(known: accelerators.Accelerator, name: str, count: float, told: StatedMemory) -> Gpu:
    """A part of a GPU has that part of its memory."""
    gib = known.memory_gib * count
    if told.size_gib is None:
        return Gpu(name=name, memory_gib=gib, flags=(NOT_GIVEN,))
    if accelerators.agrees(gib, told.size_gib):
        return Gpu(name=name, memory_gib=told.size_gib)
    return Gpu(name=name, memory_gib=gib, flags=(DISAGREES,))


def _unknown(provider: str, name: str, count: float, told: StatedMemory) -> Gpu:
    """Of an accelerator that is in no table, the first reading that could be a GPU's is believed."""
    low, high = _PLAUSIBLE_GIB
    if told.size_gib is not None:
        for flags, gib in _readings(provider, told.size_gib, told.total_gib, count):
            if low <= gib <= high:
                return Gpu(name=name, memory_gib=gib, flags=flags)
    return Gpu(name=name, memory_gib=None, flags=(UNKNOWN,))


def _readings(
    provider: str, size_gib: float, total_gib: float | None, count: float
) -> Iterator[tuple[tuple[str, ...], float]]:
    """The ways to read a size, the likeliest first."""
    plain: tuple[tuple[str, ...], float] = ((), size_gib)
    summed = ((AS_SUM,), round(size_gib / count, 3))
    if count > 1 and (provider in _SUMS or size_gib == total_gib):
        yield from (summed, plain)
    else:
        yield from (plain, summed) if count > 1 else (plain,)
    yield (IN_GIB,), size_gib * 1024
    if count > 1:
        yield (IN_GIB, AS_SUM), size_gib * 1024 / count


@lru_cache(maxsize=4096)
def told_by(text: str) -> StatedMemory:
    """GpuInfo is a Python literal, or anything else that people put there."""
    if not text or len(text) > _MAX_LITERAL:
        return StatedMemory()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of odd literals; they are only data here
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
