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

from deepvm.checkpoint.buffers.priority import lower_priority
from deepvm.checkpoint.buffers.staging import Staging
from deepvm.checkpoint.state.owners import optimizers

HEADER_BYTES = 2 * 2**20
ROOM = 2  # times the expected size is reserved; what is not touched costs nothing
PAUSE_S = 600.0  # no restore takes so long
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
        """``most_bytes``: the budget. A state that does not fit into half of the free memory is not prepared for."""
        busy = self._thread is not None and self._thread.is_alive()
        if busy or self._ended.is_set() or size_bytes > min(most_bytes or size_bytes, _available_bytes() // 2):
            return
        self.size_bytes = size_bytes
        if self._staging is None or self._staging.size_bytes < size_bytes:
            self._staging = Staging(min(ROOM * size_bytes, most_bytes or ROOM * size_bytes), warm=False)
        self._thread = threading.Thread(
            target=self._touch, args=(self._staging, size_bytes), name="deepvm-warm", daemon=True
        )
        self._thread.start()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave memory and cores to a restore."""
        self._running.clear()
        try:
            yield
        finally:
            self._running.set()

    def take(self, size_bytes: int) -> Staging | None:
        """The memory, whole: what is not touched yet is touched now. None where there is none of that size."""
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

    def _touch(self, staging: Staging, size_bytes: int) -> None:
        lower_priority()
        staging.warm(size_bytes, self._may_continue)

    def _may_continue(self) -> bool:
        self._running.wait(PAUSE_S)
        return not self._ended.is_set()


def expected_bytes(state: Mapping[str, Any]) -> int:
    """How large a state that is trained will be: its parameters, buffers, and what its optimizers keep of each; 0 where
    nothing is trained."""
    modules = [part for part in state.values() if isinstance(part, torch.nn.Module)]
    trained_by = optimizers(state)
    tensors = {id(t): t.nbytes for module in modules for t in (*module.parameters(), *module.buffers())}
    kept = sum(map(_kept_bytes, trained_by))
    return sum(tensors.values()) + kept + HEADER_BYTES if trained_by else 0


def _kept_bytes(optimizer: torch.optim.Optimizer) -> int:
    """What it keeps; before its first step what optimizers with such options usually do."""
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
