"""The options of ``deepvm calibrate overheads`` -> checked values."""

from __future__ import annotations

from dataclasses import dataclass

from deepvm.calibrate.network.settings import NODE_BYTES, USABLE, WORKER_BYTES
from deepvm.calibrate.sized_model import LEAST_BYTES
from deepvm.errors import UsageError
from deepvm.units import format_bytes, parse_bytes

WORKERS = 2
STATES_IN_WORKER = 3.5  # weights, averages and gradients; DDP's buckets; a prefetched checkpoint
STATES_IN_MEMORY_NODE = 2.5
MOST_SIZES = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class OverheadSettings:
    sizes: tuple[int, ...] = (10_000_000, 100_000_000, 1_000_000_000)
    repeats: int = 3  # preemptions at each size

    def __post_init__(self) -> None:
        if not 1 <= len(self.sizes) <= MOST_SIZES:
            raise UsageError(f"--sizes has {len(self.sizes)} sizes: give 1 to {MOST_SIZES}")
        for size in self.sizes:
            if size < LEAST_BYTES:
                raise UsageError(
                    f"--sizes has {format_bytes(size)}: a state must have at least {format_bytes(LEAST_BYTES)}"
                )
        if not 1 <= self.repeats <= 100:
            raise UsageError(f"--repeats is {self.repeats}: it must be between 1 and 100")

    def check_memory(self, free_bytes: int | None) -> None:
        """Refuse a state that does not fit into this machine's memory."""
        largest = max(self.sizes)
        needed = WORKERS * (largest * STATES_IN_WORKER + WORKER_BYTES) + largest * STATES_IN_MEMORY_NODE + NODE_BYTES
        if free_bytes is not None and needed > USABLE * free_bytes:
            raise UsageError(
                f"a state of {format_bytes(largest)} on {WORKERS} workers and a memory node needs about "
                f"{format_bytes(needed)} of memory, and {format_bytes(free_bytes)} are free: give smaller --sizes"
            )

    def memory_node_bytes(self, size: int) -> int:
        return round(size * STATES_IN_MEMORY_NODE) + 64_000_000


def parse_sizes(text: str) -> tuple[int, ...]:
    """Parse ``10MB,100MB,1GB``: each size once, in order."""
    return tuple(sorted({parse_bytes(part) for part in text.split(",")}))
