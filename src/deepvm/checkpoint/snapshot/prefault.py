"""Staging memory that is touched before the first save needs it.

Input: how large the state will probably be. Output: memory that is warm as far as there was time. It is touched by one
thread of low priority, which stops when the checkpointer is closed and waits while a restore runs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from deepvm.checkpoint.buffers.priority import start_background
from deepvm.checkpoint.buffers.staging import Staging
from deepvm.checkpoint.state.owners import optimizers

HEADER_BYTES = 2 * 2**20
ROOM = 2  # times the expected size is reserved; what is not touched costs nothing
PAUSE_S = 600.0  # no restore takes longer
JOIN_S = 60.0


class Warming:
    """``begin``, and later ``take`` or ``close``."""

    def __init__(self) -> None:
        self.size_bytes = 0  # what is being touched
        self._staging: Staging | None = None
        self._thread: threading.Thread | None = None
        self._ended, self._running = threading.Event(), threading.Event()
        self._running.set()

    def begin(self, size_bytes: int, most_bytes: int | None) -> None:
        """Touch memory in the background, unless the state exceeds the budget or half of the free memory."""
        busy = self._thread is not None and self._thread.is_alive()
        if busy or self._ended.is_set() or size_bytes > min(most_bytes or size_bytes, _available_bytes() // 2):
            return
        self.size_bytes = size_bytes
        if self._staging is None or self._staging.size_bytes < size_bytes:
            self._staging = Staging(min(ROOM * size_bytes, most_bytes or ROOM * size_bytes), warm=False)
        self._thread = start_background("deepvm-warm", self._staging.warm, size_bytes, self._may_continue)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause, to leave memory and cores to a restore."""
        self._running.clear()
        try:
            yield
        finally:
            self._running.set()

    def take(self, size_bytes: int) -> Staging | None:
        """Return the memory, all of it touched; None if it is too small."""
        self.close()
        staging, self._staging = self._staging, None
        busy = self._thread is not None and self._thread.is_alive()  # it would write zeros into what is copied
        if staging is None or staging.size_bytes < size_bytes or busy:
            return None
        staging.warm(size_bytes)
        staging.shrink(size_bytes)
        return staging

    def close(self) -> None:
        self._ended.set()
        self._running.set()
        if self._thread is not None:
            self._thread.join(JOIN_S)

    def _may_continue(self) -> bool:
        self._running.wait(PAUSE_S)
        return not self._ended.is_set()


def expected_bytes(state: Mapping[str, Any]) -> int:
    """Estimate the size of a state that is trained: its parameters, buffers, and its optimizers' state; 0 if nothing is
    trained."""
    modules = [part for part in state.values() if isinstance(part, torch.nn.Module)]
    trained_by = optimizers(state)
    tensors = {id(t): t.nbytes for module in modules for t in (*module.parameters(), *module.buffers())}
    kept = sum(map(_kept_bytes, trained_by))
    return sum(tensors.values()) + kept + HEADER_BYTES if trained_by else 0


def _kept_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the size of its state; before its first step, an estimate by its options."""
    if optimizer.state:
        return sum(t.nbytes for kept in optimizer.state.values() for t in kept.values() if isinstance(t, torch.Tensor))
    total = 0
    for group in optimizer.param_groups:
        copies = 2 if "betas" in group else int(bool(group.get("momentum"))) + int("alpha" in group)
        total += (copies + bool(group.get("amsgrad"))) * sum(p.nbytes for p in group["params"])
    return total


def _available_bytes() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            found = {name: value.split()[0] for name, _, value in (line.partition(":") for line in file)}
        return int(found["MemAvailable"]) * 1024
    except (OSError, KeyError, ValueError, IndexError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
