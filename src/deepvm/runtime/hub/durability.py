"""Waits before machines are ended until a run's newest checkpoint is durable.

Trainers end with their script, possibly before memory nodes have written their last checkpoint to disk or bucket.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from deepvm import variables
from deepvm.errors import DeepvmError
from deepvm.events import Event
from deepvm.runtime.hub.progress import Progress
from deepvm.store.memory.store import MemoryStore
from deepvm.store.urls import open_store

DURABLE_S = 60.0  # memory nodes that are ended take as long, at most


def unsafe_step(progress: Progress) -> int | None:
    """Return this session's newest checkpoint if it is not known to be durable."""
    step, durable = progress.saved_step, progress.durable_step
    if step is None or progress.saved_at_s is None:
        return None
    return step if durable is None or durable < step else None


class Durability:
    """``nodes`` returns the addresses of the run's memory nodes; ``durable`` is the URL that they copy to, if any."""

    def __init__(self, run: str, *, nodes: Callable[[], Sequence[str]], token: str, durable: str | None) -> None:
        self._run, self._nodes, self._token, self._durable = run, nodes, token, durable

    def await_newest(self, progress: Progress, pause: Callable[[], bool]) -> Event | None:
        """Wait until this session's newest checkpoint is durable, and return the event for the ledger. Return None if
        it was durable before, if time is up, or as soon as ``pause`` returns False."""
        step, until_s = unsafe_step(progress), time.monotonic() + DURABLE_S
        while step is not None and self._nodes() and time.monotonic() < until_s:
            if (place := self.place_of(step)) is not None:
                return Event.now("save", step=step, state="durable", place=place)
            if not pause():
                break
        return None

    def place_of(self, step: int) -> str | None:
        """Return where that checkpoint is durable now; None if it is not, or if no store answers."""
        try:
            return self._in_the_durable_store(step) if self._durable is not None else self._on_the_nodes_disks(step)
        except DeepvmError:  # a node that does not answer now may answer the next time
            return None

    def _in_the_durable_store(self, step: int) -> str | None:
        assert self._durable is not None  # noqa: S101 - asked before
        store = open_store(self._durable)
        try:
            return store.url if step in store.steps(self._run) else None
        finally:
            store.close()

    def _on_the_nodes_disks(self, step: int) -> str | None:
        nodes = self._nodes()
        if not nodes:
            return None
        store = MemoryStore(nodes, token=self._token, key=os.environ.get(variables.RUN_KEY, ""))
        try:
            return store.url if store.is_durable(store.states(self._run, step)) else None
        finally:
            store.close()
