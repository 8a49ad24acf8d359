"""The thread that brings one snapshot after another into the first store, and what becomes of each save.

Input: save jobs from the checkpointer; output: their handles advance, and durability.py follows what was committed. It
holds no reference to the checkpointer, so that this can be freed with all of its state.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time

from deepvm.checkpoint import ranks
from deepvm.checkpoint.determinism.component import Determinism
from deepvm.checkpoint.handle import SaveHandle, Status
from deepvm.checkpoint.save.durability import DurabilityWorker
from deepvm.checkpoint.save.event_log import EventLog
from deepvm.checkpoint.save.memory_transfer import MemoryTransfer
from deepvm.checkpoint.save.save_job import HeaderFull, SaveJob
from deepvm.checkpoint.save.step_order import StepOrder
from deepvm.checkpoint.save.store_transfer import StoreTransfer
from deepvm.checkpoint.snapshot.snapshot import Snapshot
from deepvm.checkpoint.snapshot.snapshotter import Snapshotter
from deepvm.errors import CheckpointError, DeepvmError

log = logging.getLogger("deepvm.checkpoint")

DISTURBED_S = 10.0  # until a save that has failed on one rank has ended on all
ENDING_S = 1.0  # what is left of a save once it is committed takes microseconds
LOG_WAIT_S = 5.0  # a longer wait at the end of a process is logged


class Saver:
    def __init__(
        self,
        transfer: MemoryTransfer | StoreTransfer,
        snapshotter: Snapshotter,
        determinism: Determinism,
        durability: DurabilityWorker,
        order: StepOrder,
        event_log: EventLog,
        *,
        place: str,
        status: Status,
        deadline_s: float,
        raises: bool,
    ) -> None:
        self._transfer, self._snapshotter, self._determinism = transfer, snapshotter, determinism
        self._durability, self._order, self._event_log, self._place = durability, order, event_log, place
        self._status, self._deadline_s = status, deadline_s
        self._raises = raises
        self._problem: CheckpointError | None = None
        self._last_reason: str | None = None  # why the last save failed
        self.newest: SaveHandle | None = None  # of the last save that was started
        self.snapshot: Snapshot | None = None  # of which something is live, and not yet sent
        self._jobs: queue.SimpleQueue[SaveJob | None] = queue.SimpleQueue()
        self._unconfirmed = False  # ranks have not agreed yet whether the last save was disturbed
        self.disturbed = False  # the last save failed since tensors were written; it is taken again
        self._idle = threading.Event()
        self._idle.set()
        self._thread: threading.Thread | None = None  # with the first save: a restore has the cores for itself

    def wait_idle(self, timeout_s: float) -> bool:
        """True if no save is under way, at once or within that time. A save that is committed ends in a moment, and is
        waited for: its handle says so already, and the caller may save again."""
        committed = self.newest is not None and self.newest.state in ("remote", "durable")
        return self._idle.wait(max(timeout_s, ENDING_S) if committed else timeout_s)

    def start(self, job: SaveJob) -> None:
        """Send a snapshot in the background."""
        self._idle.clear()
        self.disturbed, self._unconfirmed = False, True
        self.newest, self.snapshot = job.handle, job.snapshot
        if self._thread is None:
            self._durability.start()
            self._thread = threading.Thread(target=self._loop, name="deepvm-save", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def must_repeat(self, world_size: int) -> bool:
        """True if the last save has to be taken again, since tensors were written while it read them. Ranks agree on it
        once, at the first step after the save."""
        if world_size == 1:
            return self.disturbed and self.wait_idle(0.0)
        again = self._unconfirmed and ranks.any_of("whether the last save was disturbed", self.disturbed)
        self._unconfirmed = False
        if again:
            self.wait_idle(DISTURBED_S)
        return again

    def settle(self) -> None:
        """Copy what the save under way still reads in place."""
        snapshot, handle = self.snapshot, self.newest
        if snapshot is None or handle is None or snapshot.frozen:
            return
        began = time.perf_counter()
        snapshot.freeze()
        self.snapshot = None
        self.disturbed = self.disturbed or snapshot.torn is not None
        handle.stall_s += time.perf_counter() - began
        handle.advance("staged")

    def skipped(self, handle: SaveHandle, reason: str, *, logged: bool = True) -> None:
        self._status.skipped += 1
        if logged:
            self._event_log.saved(handle, "skipped", why=reason)
        handle.advance("skipped", reason)

    def failed(self, handle: SaveHandle, error: BaseException) -> None:
        if handle.state == "failed":  # by finish(), before
            return
        self._status.failed += 1
        self._status.last_error = f"step {handle.step} was not saved: {error}"
        first = str(error) != self._last_reason
        self._last_reason = str(error)
        if self._status.failed == 1:
            _alarm(f"{self._status.last_error} (training continues; this was the first save that failed)")
        elif first:
            log.warning("%s", self._status.last_error)
        if not isinstance(error, DeepvmError) and first:
            log.warning("where it failed:", exc_info=error)
        if self._raises:
            self._problem = CheckpointError(self._status.last_error)
        self._event_log.saved(handle, "failed", why=str(error), first=first)
        handle.advance("failed", str(error))

    def raise_problem(self) -> None:
        """Raise the error of a save that failed since the last call, if the user asked for that."""
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem

    def finish(self, ends_s: float, late: str) -> None:
        """Wait for the save under way, the last one. ``late`` is its error if it takes longer."""
        self._jobs.put(None)
        if self._thread is not None:
            self._join(self._thread, ends_s, late)
        failed, newest = self._status.failed, self._status.last_remote_step
        if failed > 1:  # which may be long ago
            kept = "nothing was saved" if newest is None else f"the newest that was saved is step {newest}"
            _alarm(f"{failed} of {failed + self._status.remote} saves failed, {kept}; {self._status.last_error}")

    def _join(self, thread: threading.Thread, ends_s: float, late: str) -> None:
        thread.join(min(LOG_WAIT_S, max(0.0, ends_s - time.monotonic())))
        left_s = ends_s - time.monotonic()
        if left_s > 0 and self.newest is not None and not self._idle.is_set():
            step = self.newest.step
            log.warning("step %d is being saved: waiting up to %.0f s more, Ctrl-C gives it up", step, left_s)
        thread.join(max(0.0, left_s))
        if self.newest is not None and not self._idle.is_set():
            self.failed(self.newest, CheckpointError(late))

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            snapshot, handle = job.snapshot, job.handle
            try:
                self._send(job)
                self._status.last_save_s = time.perf_counter() - handle.began_s
                self._status.last_stall_s = handle.stall_s
                self._event_log.saved(handle, "remote", place=self._place)
                self._status.remote += 1
                self._status.last_remote_step = handle.step
                handle.advance("remote")
                self._durability.follow(handle)
            except Exception as error:
                if snapshot.torn is not None:
                    self.disturbed = True
                    self._snapshotter.disturbed()
                if isinstance(error, HeaderFull):
                    self._snapshotter.forget_plan()
                self.failed(handle, error)
            finally:
                snapshot.end()
                self._status.stall_s += handle.stall_s
                if self.snapshot is snapshot:
                    self.snapshot = None
                mend = snapshot.mend
                del job, snapshot
                self._idle.set()
            mend()
            del mend
        self._durability.end()

    def _send(self, job: SaveJob) -> None:
        handle = job.handle
        self._order.check_alone(handle.step)
        handle.size_bytes = job.snapshot.chunk_map.layout.size_bytes
        job.facts, job.ends_s = self._determinism.facts(), time.monotonic() + self._deadline_s
        self._transfer.save(job)
        self._status.bytes_sent += handle.bytes_sent
        self._status.bytes_kept += handle.bytes_kept
        self._status.nodes_down = job.nodes_down


def _alarm(text: str) -> None:
    """Log an error that a user has to see. If a later configuration of logging has disabled our logger (``dictConfig``
    does), print it to stderr instead; if logging is off as a whole, drop it."""
    if log.isEnabledFor(logging.ERROR):
        log.error("%s", text)
    elif log.manager.disable < logging.ERROR:
        print(f"deepvm: {text}", file=sys.stderr, flush=True)
