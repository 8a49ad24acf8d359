"""The thread that brings one snapshot after another into the first store, while training goes on; and what becomes of
each save. It knows nothing of the checkpointer, which goes with all of its state as soon as nobody uses it."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence

from deepvm.checkpoint import ranks
from deepvm.checkpoint.alarms import alarm
from deepvm.checkpoint.determinism.component import Determinism
from deepvm.checkpoint.handle import SaveHandle, Status
from deepvm.checkpoint.save.durability import DurabilityWorker
from deepvm.checkpoint.save.event_log import EventLog
from deepvm.checkpoint.save.memory_transfer import MemoryTransfer
from deepvm.checkpoint.save.step_order import Order
from deepvm.checkpoint.save.store_transfer import PlainTransfer
from deepvm.checkpoint.snapshot.snapshot import Snapshot
from deepvm.checkpoint.snapshot.snapshotter import Snapshotter
from deepvm.checkpoint.state.capture import join
from deepvm.errors import CheckpointError, DeepvmError

log = logging.getLogger("deepvm.checkpoint")

DISTURBED_S = 10.0  # until a save that has failed on one rank has ended on all
STATE_FORMAT = "deepvm-state/1"
ENDING_S = 1.0  # what is left of a save once it is committed takes microseconds
TELL_S = 5.0  # a wait at the end of a process that is longer is told
_Save = tuple[Snapshot, SaveHandle, dict[str, bytearray] | str]


class Saver:
    def __init__(
        self,
        transfer: MemoryTransfer | PlainTransfer,
        taking: Snapshotter,
        determinism: Determinism,
        tiers: DurabilityWorker,
        order: Order,
        told: EventLog,
        *,
        place: str,
        status: Status,
        deadline_s: float,
        raises: bool,
    ) -> None:
        self._transfer, self._taking, self._determinism, self._durability = transfer, taking, determinism, tiers
        self._order, self._event_log, self._place = order, told, place
        self._status, self._deadline_s = status, deadline_s
        self._raises = raises
        self._problem: CheckpointError | None = None
        self._last_reason: str | None = None  # why the last one failed
        self.snapshot: Snapshot | None = None  # of which something is live, and not yet sent
        self._saves: queue.SimpleQueue[_Save | None] = queue.SimpleQueue()
        self._unconfirmed = False  # whether the last save was disturbed on another rank
        self.disturbed = False  # the last save failed since tensors were written; it is taken again
        self._idle = threading.Event()
        self._idle.set()
        self._under_way: SaveHandle | None = None
        self._thread: threading.Thread | None = None  # with the first save: a restore has the cores for itself

    @property
    def waiting(self) -> int:
        """Saves that have not begun to be sent."""
        return self._saves.qsize()

    def wait_idle(self, timeout_s: float) -> bool:
        """Whether nothing is under way, at once or within that time. A save that is committed ends in a moment, and is
        waited for: whoever heard of it may save again."""
        handle = self._under_way
        committed = handle is not None and handle.state in ("remote", "durable")
        return self._idle.wait(max(timeout_s, ENDING_S) if committed else timeout_s)

    def begin(self, snapshot: Snapshot) -> None:
        """From here on a save is under way."""
        self._idle.clear()
        self.disturbed, self._unconfirmed = False, True
        self.snapshot = snapshot

    def to_be_repeated(self, world_size: int) -> bool:
        """True if the last save has to be taken again, since tensors were written while it read them. Ranks agree on it
        once, at the first step after the save."""
        if world_size == 1:
            return self.disturbed and self.wait_idle(0.0)
        again = self._unconfirmed and ranks.any_of("whether the last save was disturbed", self.disturbed)
        self._unconfirmed = False
        if again:
            self.wait_idle(DISTURBED_S)
        return again

    def settle(self, handle: SaveHandle | None) -> None:
        """Copy what the save under way still reads in place."""
        snapshot = self.snapshot
        if snapshot is None or handle is None or snapshot.frozen:
            return
        began = time.perf_counter()
        snapshot.freeze()
        self.snapshot = None
        self.disturbed = self.disturbed or snapshot.torn is not None
        handle.stall_s += time.perf_counter() - began
        handle.advance("staged")

    def put(self, snapshot: Snapshot, handle: SaveHandle, extra: dict[str, bytearray] | str) -> None:
        """``extra`` are the state's plain values: this rank's, or all ranks' already joined."""
        if self._thread is None:
            self._durability.start()
            self._thread = threading.Thread(target=self._loop, name="deepvm-save", daemon=True)
            self._thread.start()
        self._under_way = handle
        self._saves.put((snapshot, handle, extra))

    def skipped(self, handle: SaveHandle, reason: str, *, told: bool = True) -> None:
        self._status.skipped += 1
        if told:
            self._event_log.saved(handle, "skipped", why=reason)
        handle.advance("skipped", reason)

    def failed(self, handle: SaveHandle, error: BaseException) -> None:
        if handle.state == "failed":  # given up before
            return
        self._status.failed += 1
        self._status.last_error = f"step {handle.step} was not saved: {error}"
        first = str(error) != self._last_reason
        self._last_reason = str(error)
        if self._status.failed == 1:
            alarm(f"{self._status.last_error} (training continues; this was the first save that failed)")
        elif first:
            log.warning("%s", self._status.last_error)
        if not isinstance(error, DeepvmError) and first:
            log.warning("where it failed:", exc_info=error)
        if self._raises:
            self._problem = CheckpointError(self._status.last_error)
        self._event_log.saved(handle, "failed", why=str(error), first=first)
        handle.advance("failed", str(error))

    def _tell_failures(self) -> None:
        """At the end, where saves failed, which may be long ago."""
        failed, newest = self._status.failed, self._status.last_remote_step
        if failed > 1:
            kept = "nothing was saved" if newest is None else f"the newest that was saved is step {newest}"
            alarm(f"{failed} of {failed + self._status.remote} saves failed, {kept}; {self._status.last_error}")

    def raise_problem(self) -> None:
        """That of a save which failed since the last call, where the user wants to hear of it."""
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem

    def finish(self, ends_s: float, late: str) -> None:
        """Wait for what is under way; no other save will come. ``late`` tells why one is given up that takes longer."""
        self._saves.put(None)
        if self._thread is not None:
            self._finish(self._thread, ends_s, late)
        self._tell_failures()

    def _finish(self, thread: threading.Thread, ends_s: float, late: str) -> None:
        thread.join(min(TELL_S, max(0.0, ends_s - time.monotonic())))
        handle = self._under_way
        if thread.is_alive() and handle is not None and ends_s > time.monotonic():
            left_s = ends_s - time.monotonic()
            log.warning("step %d is being saved: waiting up to %.0f s more, Ctrl-C gives it up", handle.step, left_s)
        thread.join(max(0.0, ends_s - time.monotonic()))
        handle = self._under_way
        if thread.is_alive() and handle is not None:
            self.failed(handle, CheckpointError(late))

    def _loop(self) -> None:
        while (work := self._saves.get()) is not None:
            snapshot, handle, extra = work
            try:
                self._send(snapshot, handle, extra if isinstance(extra, str) else join(extra))
                self._status.last_save_s = time.perf_counter() - handle.began_s
                self._event_log.saved(handle, "remote", place=self._place)
                self._status.remote += 1
                self._status.last_remote_step = handle.step
                handle.advance("remote")
                self._durability.follow(handle)
            except Exception as error:
                if snapshot.torn is not None:
                    self.disturbed = True
                    self._taking.disturbed()
                self.failed(handle, error)
            finally:
                snapshot.end()
                self._status.stall_s += handle.stall_s
                if self.snapshot is snapshot:
                    self.snapshot = None
                mend = snapshot.mend
                del work, snapshot, extra
                self._under_way = None
                self._idle.set()
            mend()
            del mend
        self._durability.end()

    def _send(self, snapshot: Snapshot, handle: SaveHandle, skeleton: str) -> None:
        self._order.check_alone(handle.step)
        layout = snapshot.pieces.layout
        handle.size_bytes = layout.size_bytes

        def write_header(skeletons: Sequence[str]) -> None:
            header = layout.header({"format": STATE_FORMAT, "skeleton": f"[{', '.join(skeletons)}]"})
            if header is None:
                self._taking.forget_plan()
                raise CheckpointError(
                    "the plain values of the state have outgrown the header: the next save makes room"
                )
            snapshot.staging.view[: len(header)] = header

        sent = self._transfer.save(
            snapshot,
            handle.step,
            extra=skeleton,
            write_header=write_header,
            facts=self._determinism.facts(),
            deadline_s=self._deadline_s,
            on_sent=lambda: handle.advance("staged"),
            attempt=handle.attempt,
        )
        handle.bytes_sent, handle.bytes_kept = sent.bytes_sent, sent.bytes_kept
        self._status.bytes_sent += sent.bytes_sent
        self._status.bytes_kept += sent.bytes_kept
        self._status.nodes_down = sent.nodes_down
