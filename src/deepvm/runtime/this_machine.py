"""This host -> its description in profiles: processor, cores, memory, GPUs, and the software's versions."""

from __future__ import annotations

import os
import platform
import re
import time
from importlib import metadata
from pathlib import Path

from deepvm.performance.measured import Machine, Provenance

_CPU_INFO = Path("/proc/cpuinfo")
_GPUS = Path("/proc/driver/nvidia/gpus")
_BOARD = Path("/sys/devices/virtual/dmi/id")
_PACKAGES = ("torch", "numpy")


def this_machine() -> Machine:
    """Describe this host. What it does not tell is None."""
    gpus = _gpus()
    return Machine(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=_memory_bytes(),
        instance=_instance(),
        accelerator=gpus[0] if gpus else None,
        accelerator_count=len(gpus),
    )


def here_and_now() -> Provenance:
    """Return where, when and with which software something is measured now."""
    return Provenance(machine=this_machine(), date=time.strftime("%Y-%m-%dT%H:%M:%S%z"), versions=versions())


def versions() -> dict[str, str]:
    from deepvm import __version__

    found = {"deepvm": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cpu() -> str:
    try:
        named = re.search(r"^model name\s*:\s*(.+)$", _CPU_INFO.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        named = None
    return (named[1].strip() if named else platform.processor() or platform.machine() or "unknown")[:200]


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _instance() -> str | None:
    """Return the type of an EC2 machine, which its firmware tells as the product's name."""
    try:
        vendor, product = (
            (_BOARD / name).read_text(encoding="utf-8").strip() for name in ("sys_vendor", "product_name")
        )
    except (OSError, UnicodeDecodeError):
        return None
    return product[:200] if vendor == "Amazon EC2" and re.fullmatch(r"[a-z0-9-]+\.[a-z0-9-]+", product) else None


def _gpus() -> list[str]:
    """Return the models of NVIDIA's GPUs, as the driver lists them."""
    found = []
    for path in sorted(_GPUS.glob("*/information")):
        try:
            named = re.search(r"^Model:\s*(.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        except OSError:
            continue
        if named:
            found.append(named[1].strip().removeprefix("NVIDIA ").removeprefix("Tesla ")[:200])
    return found
