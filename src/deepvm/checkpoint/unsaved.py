"""Which step no save has yet: what close(), and a normal end of the process, still have to save."""

from __future__ import annotations

import threading

from deepvm.checkpoint.handle import SaveHandle


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

    def is_current(self) -> bool:
        """True if the policy decides what is saved, the state still is that of the step, and no other thread trains."""
        busy = self._thread is not threading.current_thread() and self._thread.is_alive()
        return self.step is not None and not self.by_hand and not self._stepped_since and not busy

    def is_missing_from(self, newest: SaveHandle | None) -> bool:
        """True if the newest save, which is finished, does not have the step."""
        return newest is None or newest.step != self.step or newest.state not in ("remote", "durable")
