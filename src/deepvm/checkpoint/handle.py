"""What a caller sees of one save (SaveHandle), and of all saves (Status). save/ updates both."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Literal

from deepvm.errors import CheckpointError, UsageError

State = Literal["taken", "staged", "remote", "durable", "skipped", "failed"]
_ORDER: tuple[State, ...] = ("taken", "staged", "remote", "durable")
_changed = threading.Condition()  # shared by all handles: one for each would be one more object on the trainer's heap


class SaveHandle:
    """One save. ``taken``: under way; ``staged``: the optimizer need not wait for it any more; ``remote``: committed in
    the first store; ``durable``: on a disk or in object storage; ``skipped`` or ``failed``: see ``reason``."""

    def __init__(self, step: int, attempt: int = 0) -> None:
        self.step, self.attempt = step, attempt
        self.began_s = time.perf_counter()
        self.stall_s = 0.0  # how long the trainer waited for it
        self.size_bytes = 0  # of the whole checkpoint; known once it is being sent
        self.bytes_in_place = 0  # read where they are, after save() returned; the others were copied by save()
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
        """Wait until the save has reached a state. Raises CheckpointError if it failed, or is not there in time."""
        if state not in _ORDER:
            raise UsageError(f"cannot wait for a save to be {state!r}: wait for one of {', '.join(_ORDER)}")

        def settled() -> bool:
            return self.state not in _ORDER or _ORDER.index(self.state) >= _ORDER.index(state)

        with _changed:
            if not _changed.wait_for(settled, timeout_s):
                raise CheckpointError(f"step {self.step} is {self.state} and did not become {state} in {timeout_s:g} s")
            if self.state not in _ORDER:
                raise CheckpointError(f"step {self.step} was {self.state}: {self.reason}")

    def wait_for_the_end(self, ends_s: float | None) -> None:
        """Wait until this machine is preempted, at a time of the monotonic clock, unless the save fails."""
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
    last_stall_s: float | None = None  # how long the trainer waited for that save
    nodes_down: tuple[str, ...] = ()
    drift: tuple[str, ...] = ()  # why the restored run does not continue bit for bit
    last_witness_step: int | None = None  # the newest step that can be verified by replay
