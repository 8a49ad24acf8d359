"""Work whose results stay for the whole run, kept off the trainer's heap."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def run_off_heap(work: Callable[[], T]) -> T:
    """Run the work in a thread of its own, since each thread allocates from its own heap. On the trainer's heap its
    results would lie where activations were, and an activation that no longer fits there takes new memory. Not for the
    user's code, which may depend on its thread."""
    with ThreadPoolExecutor(1, "deepvm-off-heap") as pool:
        return pool.submit(work).result()
