"""A run's newest checkpoint -> the event that it is durable, before machines are ended.

Trainers may end before memory nodes have written their last checkpoint to disk or bucket.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing

from deepvm import variables
from deepvm.errors import DeepvmError
from deepvm.events import Event
from deepvm.runtime.hub.progress import Progress
from deepvm.store.memory.store import MemoryStore
from deepvm.store.urls import open_store

DURABLE_S = 60.0  # as long as memory nodes may take to end


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
        nodes = self._nodes()
        try:
            if self._durable is not None:
                with closing(open_store(self._durable)) as store:
                    return store.url if step in store.steps(self._run) else None
            if nodes:
                with closing(MemoryStore(nodes, token=self._token, key=os.environ.get(variables.RUN_KEY, ""))) as node:
                    return node.url if node.is_durable(node.watch(self._run).states(step)) else None
        except DeepvmError:  # a node that does not answer now may answer the next time
            pass
        return None
