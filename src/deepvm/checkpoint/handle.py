"""What a caller learns of a save, and of all saves: the truth, as it becomes known."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Literal

from deepvm.errors import CheckpointError, UsageError

State = Literal["taken", "staged", "remote", "durable", "skipped", "failed"]
_ORDER: tuple[State, ...] = ("taken", "staged", "remote", "durable")
_changed = threading.Condition()  # of all handles: each one's own would be one more thing on the trainer's heap


class SaveHandle:
    """One save. ``taken``: under way; ``staged``: nothing waits for the optimizer any more; ``remote``: committed in
    the first store; ``durable``: on a disk or in object storage; ``skipped`` or ``failed``: see ``reason``."""

    def __init__(self, step: int, attempt: int = 0) -> None:
        self.step, self.attempt = step, attempt
        self.began_s = time.perf_counter()
        self.stall_s = 0.0  # how long the trainer waited for it
        self.size_bytes = 0  # of the whole checkpoint; known once it is being sent
        self.bytes_sent = 0  # by this rank
        self.bytes_kept = 0  # at the nodes already, of an earlier save or of another run, and not sent again
        self.reason: str | None = None
        self.state: State = "taken"

    def __repr__(self) -> str:
        return f"SaveHandle(step={self.step}, state={self.state!r}" + (f", {self.reason}" if self.reason else "") + ")"

    def advance(self, state: State, reason: str | None = None) -> None:
        with _changed:
            if self.state in ("skipped", "failed"):
                return
            if state in _ORDER and _ORDER.index(state) <= _ORDER.index(self.state):
                return
            self.state, self.reason = state, reason or self.reason
            _changed.notify_all()

    def wait(self, state: State = "remote", timeout_s: float = 60.0) -> None:
        """Return once the save has come that far. Raises CheckpointError when it cannot, or did not in time."""
        if state not in _ORDER:
            raise UsageError(f"a save cannot be waited for to be {state!r}: {', '.join(_ORDER)}")

        def settled() -> bool:
            return self.state not in _ORDER or _ORDER.index(self.state) >= _ORDER.index(state)

        with _changed:
            if not _changed.wait_for(settled, timeout_s):
                raise CheckpointError(f"step {self.step} is {self.state} and did not become {state} in {timeout_s:g} s")
            if self.state not in _ORDER:
                raise CheckpointError(f"step {self.step} was {self.state}: {self.reason}")

    def wait_for_the_end(self, ends_s: float | None) -> None:
        """Wait until this machine is taken away, at a time of the monotonic clock, unless the save has come to
        nothing."""
        with _changed:
            while ends_s is not None and (left_s := ends_s - time.monotonic()) > 0:
                if self.state in ("skipped", "failed"):
                    return
                _changed.wait(left_s)


@dataclass(kw_only=True)
class Status:
    """All saves of a checkpointer so far."""

    taken: int = 0
    remote: int = 0
    durable: int = 0
    skipped: int = 0
    failed: int = 0
    last_remote_step: int | None = None
    last_durable_step: int | None = None
    last_error: str | None = None
    stall_s: float = 0.0
    bytes_sent: int = 0
    bytes_kept: int = 0
    staging_bytes: int = 0
    last_save_s: float | None = None  # from save() to remote
    nodes_down: tuple[str, ...] = field(default=())
    drift: tuple[str, ...] = ()  # why the run that was restored does not go on bit for bit
    last_witness_step: int | None = None  # the newest that can be proven by replay
