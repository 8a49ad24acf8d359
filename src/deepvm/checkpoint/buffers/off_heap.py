"""Work whose results stay for the whole run, kept off the trainer's heap."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def run_off_heap(work: Callable[[], T]) -> T:
    """Do it in a thread of its own, since each thread takes memory from a heap of its own. What stays on the trainer's
    lies where its activations were: one that no longer fits there takes new memory, and many are larger than all that
    stays of a save. Not for code of the user's, which may depend on the thread that it runs in."""
    with ThreadPoolExecutor(1, "deepvm-apart") as pool:
        return pool.submit(work).result()
