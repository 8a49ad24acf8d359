"""Which step no save has yet: what close(), and a normal end of the process, still have to save."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from deepvm.checkpoint import ranks
from deepvm.checkpoint.ending.as_told import AsTold
from deepvm.checkpoint.handle import SaveHandle
from deepvm.checkpoint.save.saver import Saver
from deepvm.errors import CheckpointError

log = logging.getLogger("deepvm.checkpoint")

TOGETHER_S = 30.0  # how long ranks wait for each other: their loops end at about the same time


class Unsaved:
    """Sees the steps that are told, and those that optimizers make. Whoever calls save() decides what is saved; then
    nothing is, but that."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.step: int | None = None  # the last one that was told
        self.by_hand = False  # save() was called, and not by the policy
        self.failed = ""  # the exception that ends the process, or the with block
        self.instead: Mapping[str, Any] = {}  # what the last save has in place of components that are ahead of the step
        self._as_told = AsTold(state)
        self._stepped_since = False
        self._thread = threading.current_thread()

    def told(self, step: int, *, arriving: bool) -> None:
        self.step, self._stepped_since = step, False
        self._thread = threading.current_thread()
        self._as_told.take(arriving=arriving)

    def optimizer_steps(self) -> None:
        self._stepped_since = True

    def save(
        self,
        save: Callable[[int], SaveHandle],
        sending: Saver,
        newest: Callable[[], SaveHandle | None],
        group: ranks.Meetings | None,
        ends_s: float,
    ) -> None:
        """Save the last step, where no save has it, together with all ranks."""
        left_s = max(0.0, ends_s - time.monotonic())
        if self.step is None or self.by_hand or self._is_busy() or not sending.wait_idle(left_s):
            return
        if not self._is_missing_from(newest()):
            return
        reason = self._why_not(group)
        if reason is not None:
            log.warning("step %d was not saved: %s%s", self.step, reason, f" ({self.failed})" * bool(self.failed))
            return
        try:
            with ranks.within(group), self._as_told.put_back() as self.instead:
                ranks.meet("close()", self.step, deadline_s=min(TOGETHER_S, left_s))
                save(self.step)
        except CheckpointError as error:
            log.warning("the last step, %d, is not saved: %s", self.step, error)
        finally:
            self.instead = {}

    def _is_busy(self) -> bool:
        """Another thread trains."""
        return self._thread is not threading.current_thread() and self._thread.is_alive()

    def _why_not(self, group: ranks.Meetings | None) -> str | None:
        """Why the state cannot be saved as that of the step."""
        if self._stepped_since:
            return "an optimizer has stepped since"
        changed = self._as_told.changed()
        if changed is not None:
            return f"{changed} was written to since; call ckpt.save({self.step}) before the state is changed"
        if self.failed and group is not None:
            return "an exception ends this rank, and the others may have gone on"
        return None

    def _is_missing_from(self, newest: SaveHandle | None) -> bool:
        """True if the newest save, which is finished, does not have the step."""
        return newest is None or newest.step != self.step or newest.state not in ("remote", "durable")
