"""Which step no save has yet: what close(), and a normal end of the process, still have to save."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from deepvm.checkpoint import ranks
from deepvm.checkpoint.handle import SaveHandle
from deepvm.checkpoint.sending import Sending
from deepvm.errors import CheckpointError

log = logging.getLogger("deepvm.checkpoint")

TOGETHER_S = 30.0  # how long ranks wait for each other: their loops end at about the same time


class Unsaved:
    """Sees the steps that are told, and those that optimizers make. Whoever calls save() decides what is saved; then
    nothing is, but that."""

    def __init__(self) -> None:
        self.step: int | None = None  # the last one that was told
        self.by_hand = False  # save() was called, and not by the policy
        self._stepped_since = False
        self._thread = threading.current_thread()

    def told(self, step: int) -> None:
        self.step, self._stepped_since = step, False
        self._thread = threading.current_thread()

    def optimizer_steps(self) -> None:
        self._stepped_since = True

    def save(
        self,
        save: Callable[[int], SaveHandle],
        sending: Sending,
        newest: Callable[[], SaveHandle | None],
        group: ranks.Meetings | None,
        ends_s: float,
    ) -> None:
        """Save the last step, where no save has it, together with all ranks."""
        left_s = max(0.0, ends_s - time.monotonic())
        if self.step is None or not self.is_current() or not sending.wait_idle(left_s):
            return
        if not self.is_missing_from(newest()):
            return
        try:
            with ranks.within(group):
                ranks.meet("close()", self.step, deadline_s=min(TOGETHER_S, left_s))
                save(self.step)
        except CheckpointError as error:
            log.warning("the last step, %d, is not saved: %s", self.step, error)

    def is_current(self) -> bool:
        """True if the policy decides what is saved, the state still is that of the step, and no other thread trains."""
        busy = self._thread is not threading.current_thread() and self._thread.is_alive()
        return self.step is not None and not self.by_hand and not self._stepped_since and not busy

    def is_missing_from(self, newest: SaveHandle | None) -> bool:
        """True if the newest save, which is finished, does not have the step."""
        return newest is None or newest.step != self.step or newest.state not in ("remote", "durable")
