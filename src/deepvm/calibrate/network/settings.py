"""The options of ``deepvm calibrate network`` -> checked values: what to measure, and whether it fits this machine."""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from deepvm.calibrate.sized_model import LEAST_BYTES
from deepvm.errors import UsageError
from deepvm.units import format_bytes

MOST_MACHINES = 250  # addresses of one network
MOST_GBPS = 1000.0
LEAST_GBPS = 0.001
MOST_POINTS = 5000
WORKER_BYTES = 300_000_000  # of a process with torch, without any state
NODE_BYTES = 60_000_000
STATES_IN_WORKER = 2.5  # weights, averages and gradients, and a copy of what is not sent yet
STATES_IN_NODES = 2.5  # of each worker: two checkpoints, and the rest of their last blocks
USABLE = 0.8  # of the memory that is free
_CHUNKS = 128  # of a checkpoint at least, so that any number of nodes shares it evenly


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkSettings:
    """All combinations are measured, each ``repeats`` times."""

    workers: tuple[int, ...] = (1, 2, 4)
    memory_nodes: tuple[int, ...] = (1, 2, 3, 4)
    links_gbps: tuple[float, ...] = (1.0, 5.0, 10.0, 25.0)
    checkpoint_bytes: int = 64_000_000
    repeats: int = 5

    def __post_init__(self) -> None:
        for what, counts in (("--workers", self.workers), ("--memory-nodes", self.memory_nodes)):
            if not counts:
                raise UsageError(f"{what} is empty: name at least one number")
            for count in counts:
                if count < 1:
                    raise UsageError(f"{what} has {count}: it must be 1 or more")
        for rate in self.links_gbps:
            if not (math.isfinite(rate) and LEAST_GBPS <= rate <= MOST_GBPS):
                raise UsageError(
                    f"--links has {rate:g} Gbit/s: a link's rate is between {LEAST_GBPS:g} and {MOST_GBPS:g} Gbit/s"
                )
        if not self.links_gbps:
            raise UsageError("--links is empty: name at least one rate in Gbit/s")
        if self.checkpoint_bytes < LEAST_BYTES:
            raise UsageError(
                f"--checkpoint-size is {format_bytes(self.checkpoint_bytes)}: it must be at least "
                f"{format_bytes(LEAST_BYTES)}"
            )
        if not 1 <= self.repeats <= 1000:
            raise UsageError(f"--repeats is {self.repeats}: it must be between 1 and 1000")
        machines = max(self.workers) + max(self.memory_nodes)
        if machines > MOST_MACHINES:
            raise UsageError(
                f"{max(self.workers)} workers and {max(self.memory_nodes)} memory nodes are {machines} machines: "
                f"one host plays at most {MOST_MACHINES}"
            )
        points = len(self.workers) * len(self.memory_nodes) * len(self.links_gbps)
        if points > MOST_POINTS:
            raise UsageError(f"these are {points} combinations: measure at most {MOST_POINTS} at once")

    @property
    def needed_bytes(self) -> int:
        """The memory that the largest combination needs."""
        workers, nodes = max(self.workers), max(self.memory_nodes)
        states = workers * self.checkpoint_bytes * (STATES_IN_WORKER + STATES_IN_NODES)
        return round(states + workers * WORKER_BYTES + nodes * NODE_BYTES)

    def check_memory(self, free_bytes: int | None) -> None:
        """Refuse what does not fit into this machine's memory."""
        if free_bytes is not None and self.needed_bytes > USABLE * free_bytes:
            raise UsageError(
                f"{max(self.workers)} workers with checkpoints of {format_bytes(self.checkpoint_bytes)} need about "
                f"{format_bytes(self.needed_bytes)} of memory, and {format_bytes(free_bytes)} are free: give smaller "
                "--workers or --checkpoint-size"
            )

    @property
    def block_bytes(self) -> int:
        """The chunk size of the memory nodes: small enough that any number of nodes shares a checkpoint evenly."""
        pages = max(16, min(1024, self.checkpoint_bytes // _CHUNKS // 4096))
        return pages * 4096

    def capacity_bytes(self, memory_nodes: int) -> int:
        """The memory of each of this number of nodes."""
        total = max(self.workers) * self.checkpoint_bytes * STATES_IN_NODES
        return round(total / memory_nodes) + 64 * self.block_bytes


def free_memory_bytes() -> int | None:
    """Return the memory that processes can still take; None if the system does not tell."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None


def no_links_because() -> str | None:
    """Return why links cannot be limited here, in a few words; None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return (
        f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed (iproute2)" if missing else None
    )


def parse_rates(text: str) -> tuple[float, ...]:
    """Parse rates in Gbit/s: ``1,5,10,25``."""
    try:
        return tuple(sorted({float(part) for part in text.split(",")}))
    except ValueError:
        raise UsageError(f"--links {text!r} is not a list of rates in Gbit/s: write 1,5,10,25") from None
