"""The step that no save has yet: what close(), and a normal end of the process, still have to save."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from deepvm.checkpoint import ranks
from deepvm.checkpoint.ending.state_at_step import StateAtStep
from deepvm.checkpoint.handle import SaveHandle
from deepvm.checkpoint.save.saver import Saver
from deepvm.errors import CheckpointError

log = logging.getLogger("deepvm.checkpoint")

TOGETHER_S = 30.0  # how long ranks wait for each other: their loops end at about the same time


class Unsaved:
    """Observes step() and the optimizers' steps. A program that calls save() decides what is saved: then nothing else
    is."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.step: int | None = None  # the last one of step()
        self.by_hand = False  # save() was called, and not by the policy
        self.failed = ""  # the exception that ends the process, or the with block
        self.replaced: Mapping[str, Any] = {}  # what the last save has for components that are ahead of the step
        self._recorded = StateAtStep(state)
        self._stepped_since = False
        self._thread = threading.current_thread()

    def stepped(self, step: int, *, arriving: bool) -> None:
        self.step, self._stepped_since = step, False
        self._thread = threading.current_thread()
        self._recorded.record(arriving=arriving)

    def optimizer_steps(self) -> None:
        self._stepped_since = True

    def save(
        self, save: Callable[[int], SaveHandle], saver: Saver, group: ranks.Meetings | None, ends_s: float
    ) -> None:
        """Save the last step if no save has it, together with all ranks."""
        left_s = max(0.0, ends_s - time.monotonic())
        if self.step is None or self.by_hand or self._is_busy() or not saver.wait_idle(left_s):
            return
        newest = saver.newest  # which is finished
        if newest is not None and newest.step == self.step and newest.state in ("remote", "durable"):
            return
        reason = self._why_not(group)
        if reason is not None:
            log.warning("step %d was not saved: %s%s", self.step, reason, f" ({self.failed})" * bool(self.failed))
            return
        try:
            with ranks.within(group), self._recorded.put_back() as self.replaced:
                ranks.meet("close()", self.step, deadline_s=min(TOGETHER_S, left_s))
                save(self.step)
        except CheckpointError as error:
            log.warning("the last step, %d, is not saved: %s", self.step, error)
        finally:
            self.replaced = {}

    def _is_busy(self) -> bool:
        """True if another thread trains."""
        return self._thread is not threading.current_thread() and self._thread.is_alive()

    def _why_not(self, group: ranks.Meetings | None) -> str | None:
        """Return why the state cannot be saved as that of the step; None if it can."""
        if self._stepped_since:
            return "an optimizer has stepped since"
        changed = self._recorded.changed()
        if changed is not None:
            return f"{changed} was written to since; call ckpt.save({self.step}) before the state is changed"
        if self.failed and group is not None:
            return "an exception ends this rank, and the others may have continued"
        return None
