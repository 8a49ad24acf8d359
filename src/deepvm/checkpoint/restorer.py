"""The restores of one checkpointer: a checkpoint in its stores -> its state, now or lazily, and verified by replay.

``restore.select`` finds and loads the checkpoint; this module holds what outlives one restore.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from deepvm.checkpoint.determinism.component import Determinism
from deepvm.checkpoint.determinism.replay import Step, replay_step
from deepvm.checkpoint.handle import Status
from deepvm.checkpoint.restore.lazy import LazyRestore
from deepvm.checkpoint.restore.newest import Restored, restore_newest
from deepvm.checkpoint.restore.prefetched import fetched_first
from deepvm.checkpoint.restore.selection import Wanted
from deepvm.checkpoint.snapshot.prefault import Warming
from deepvm.checkpoint.state.own_state import write_back
from deepvm.checkpoint.timeline import Start
from deepvm.store.base import Store

log = logging.getLogger("deepvm.checkpoint")


class Restorer:
    def __init__(
        self,
        stores: Sequence[Store],
        run: str,
        state: Mapping[str, Any],
        *,
        determinism: Determinism,
        start: Start,
        warming: Warming,
        status: Status,
        deadline_s: float,
    ) -> None:
        self._stores, self._run, self._state = stores, run, state
        self._determinism, self._start, self._warming = determinism, start, warming
        self._status, self._deadline_s = status, deadline_s
        self._lazy: LazyRestore | None = None
        self.restored: Restored | None = None  # what the last restore loaded, and what it left out
        self.replaying = False

    @property
    def unfinished(self) -> bool:
        """True if a lazy restore still writes to the state."""
        return self._lazy is not None and self._lazy.open

    def restore(
        self, components: dict[str, Any], step: int | None, *, lazy: bool = False, wanted: Wanted | None = None
    ) -> Restored | None:
        """Load the newest whole checkpoint, or that of ``step``, into the components. None if no store has any."""
        if self._lazy is not None:
            self._lazy.abandon()
            self._lazy = None
        self._determinism.forget()
        with self._start.restoring(), ExitStack() as stack:
            stack.enter_context(self._warming.paused())
            stores = stack.enter_context(fetched_first(self._stores, self._run, self._start))
            restored = restore_newest(stores, self._run, components, step, wanted, lazy, deadline_s=self._deadline_s)
            if restored is not None and restored.lazy is not None:
                self._lazy = restored.lazy
                self._lazy.when_over(stack.pop_all().close)  # until then it reads from these stores
        if restored is None:
            return None
        write_back(self._state, components)
        self._status.drift = (*restored.left_as_it_was(), *self._determinism.resume(restored.facts))
        return dataclasses.replace(restored, drift=self._status.drift)

    def verify(self, restored: Restored, step: Step, components: Callable[[], dict[str, Any]]) -> Restored | None:
        """Replay the step after a restored one, compare it with its witness, and load the checkpoint again."""
        self.replaying = True
        try:
            replay_step(self._stores, self._run, restored.step, step, components)
        finally:
            self.replaying = False
            self._determinism.settle()
            again = self.restore(components(), restored.step)  # training continues from here, whatever replay found
        return None if again is None else dataclasses.replace(again, replayed=True)

    def finish(self) -> None:
        """Wait for all bytes that a lazy restore has not delivered yet."""
        if self._lazy is not None:
            self._lazy.finish()
            self._lazy = None

    def report_drift(self, reasons: Sequence[str]) -> None:
        """Log and record why training no longer continues bit for bit after the restore."""
        if reasons and self.restored is not None:
            log.warning("the run that was restored has drifted: %s", "; ".join(reasons))
            self._status.drift = (*self._status.drift, *reasons)
            self.restored = dataclasses.replace(self.restored, drift=self._status.drift)
