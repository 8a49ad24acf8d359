"""Write committed checkpoints back to one sink, in a thread: newest first, with retries, without delaying saves."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from deepvm.errors import StoreError
from deepvm.memnode.errors import RequestRefused
from deepvm.memnode.monitoring.log import Log
from deepvm.memnode.storage.checkpoint import Checkpoint
from deepvm.memnode.storage.run import Run
from deepvm.memnode.writeback.held_chunks import HeldChunks, Superseded

FIRST_RETRY_S, LAST_RETRY_S = 0.25, 60.0
ANSWER_S = 0.002  # a writer that begins at once would take the processor from the answer to the commit


class Sink(Protocol):
    @property
    def name(self) -> str: ...
    def wants(self, checkpoint: Checkpoint) -> bool: ...
    def write(self, run: Run, checkpoint: Checkpoint, source: HeldChunks) -> None: ...
    def remove(self, run: Run, checkpoint: Checkpoint) -> None: ...
    def is_lost(self) -> bool:
        """True if no write can succeed any more. It is asked after one has failed."""
        ...

    def close(self) -> None: ...


@dataclass
class _Job:
    run: Run
    checkpoint: Checkpoint
    removal: bool = False  # else it is written
    not_before_s: float = 0.0
    attempts: int = 0


class WritebackWorker:
    """At most one checkpoint of each run waits: a newer one replaces it, and it counts as skipped."""

    def __init__(self, sink: Sink, log: Log, hold: Callable[[Run, Checkpoint], HeldChunks]) -> None:
        self.sink, self._log, self._hold = sink, log, hold
        self.written = self.skipped = self.failures = 0
        self.last_error: str | None = None
        self._jobs: dict[str, _Job] = {}  # by run: what is written next
        self._removals: dict[tuple[str, int], _Job] = {}  # by run and step: deleted checkpoints until they are removed
        self._changed = threading.Condition()
        self._busy = self._closed = self._flushing = self._lost = False
        self._source: HeldChunks | None = None
        self._abandoned = False
        self._thread = threading.Thread(target=self._work, name=f"deepvm-{sink.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # --- from other threads ---------------------------------------------------------------------------------------

    def offer(self, run: Run, checkpoint: Checkpoint) -> None:
        if not self.sink.wants(checkpoint):
            return
        with self._changed:
            if self._jobs.pop(run.name, None) is not None:
                self.skipped += 1
            self._jobs[run.name] = _Job(run, checkpoint, not_before_s=time.monotonic() + ANSWER_S)
            self._changed.notify_all()

    def remove(self, run: Run, step: int, deleted: Checkpoint | None) -> None:
        """Remove a deleted checkpoint from the sink, too, in this thread: writes may take long. If that fails, raise;
        the worker tries again. Without ``deleted``, finish an earlier removal of the step that failed."""
        with self._changed:
            if deleted is not None:
                self._removals[run.name, step] = _Job(run, deleted, removal=True, not_before_s=math.inf)
            job = self._removals.get((run.name, step))
        if job is not None and not self._attempt(job):
            raise RequestRefused(
                "busy",
                f"step {step} is deleted in this node, but not in its {self.sink.name} store ({self.last_error}): "
                "delete it again; the node tries, too, while it runs",
            )

    def make_room(self, run: Run) -> None:
        """Release what is held of an evicted checkpoint, since a save has no room. A write is not abandoned for a newer
        checkpoint twice in a row, or a slow disk would never have a whole one."""
        with self._changed:
            source, newer = self._source, run.name in self._jobs
        if source is not None and source.release(abandon=newer and not self._abandoned):
            self._log.warning("made room", worker=self.sink.name, step=source.checkpoint.step)

    @property
    def waiting(self) -> int:
        return len(self._jobs) + len(self._removals) + self._busy

    def status(self) -> dict[str, Any]:
        name = self.sink.name
        return {
            f"{name}_waiting": self.waiting,
            f"{name}_written": self.written,
            f"{name}_skipped": self.skipped,
            f"{name}_failures": self.failures,
            f"{name}_error": self.last_error,
        }

    def flush(self, deadline: float) -> bool:
        """Wait until everything is written, and retry failures at once. Return False if time is up before, or if the
        sink is lost."""
        with self._changed:
            self._flushing, self._lost = True, False
            for job in (*self._jobs.values(), *self._removals.values()):
                job.not_before_s = 0.0
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self.waiting or self._lost, max(0.0, deadline - time.monotonic()))
            return not self.waiting

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(5)
        self.sink.close()

    # --- in its own thread ----------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._changed:
                job = self._next()
                if job is None:
                    return
                self._busy = not job.removal
            try:
                self._attempt(job)
            finally:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()

    def _next(self) -> _Job | None:
        while not self._closed:
            now, soonest = time.monotonic(), 60.0
            for job in (*self._removals.values(), *reversed(self._jobs.values())):
                left = job.not_before_s - now
                if left <= 0:
                    if not job.removal:
                        del self._jobs[job.run.name]
                    return job
                soonest = min(soonest, left)
            self._changed.wait(soonest)
        return None

    def _attempt(self, job: _Job) -> bool:
        """Do a job; return False if it failed and is tried again."""
        job.attempts += 1
        try:
            if job.removal:
                self.sink.remove(job.run, job.checkpoint)
                self._end_removal(job)
            else:
                self._write(job.run, job.checkpoint)
        except Superseded:
            self.skipped += 1
        except Exception as error:  # a worker that dies would lose checkpoints silently
            reason = str(error) if isinstance(error, (StoreError, OSError)) else f"{type(error).__name__}: {error}"
            self.failures += 1
            self.last_error = reason
            step, attempt = job.checkpoint.step, job.attempts
            self._log.error(self.sink.name, run=job.run.name, step=step, attempt=attempt, error=reason)
            self._retry(job)
            self._lost = self.sink.is_lost()
            return False
        else:
            self.last_error = None
        return True

    def _retry(self, job: _Job) -> None:
        with self._changed:
            if not job.removal and (job.run.name in self._jobs or job.checkpoint.is_deleted()):
                self.skipped += 1
                return
            job.not_before_s = time.monotonic() + (FIRST_RETRY_S if self._flushing else pause_s(job.attempts))
            if not job.removal:  # a removal stays in its list until it is done
                self._jobs[job.run.name] = job
            self._changed.notify_all()

    def _end_removal(self, job: _Job) -> None:
        with self._changed:
            if self._removals.get((job.run.name, job.checkpoint.step)) is job:
                del self._removals[job.run.name, job.checkpoint.step]
            self._changed.notify_all()

    def _write(self, run: Run, checkpoint: Checkpoint) -> None:
        if checkpoint.is_deleted():
            return
        started_s = time.monotonic()
        try:
            with self._hold(run, checkpoint) as source:
                self._source = source
                self.sink.write(run, checkpoint, source)
        except Superseded:
            self._abandoned = True
            raise
        finally:
            self._source = None
        self._abandoned = False
        with self._changed:
            if not checkpoint.is_deleted():  # what an earlier removal of this step was for is replaced
                self._removals.pop((run.name, checkpoint.step), None)
        self.written += 1
        run.mark_changed()
        taken_s = round(time.monotonic() - started_s, 4)
        self._log.info(self.sink.name, run=run.name, step=checkpoint.step, taken_s=taken_s)


def pause_s(attempts: int) -> float:
    """Return the pause after this number of failures: it doubles with each, up to a limit."""
    return min(FIRST_RETRY_S * 2.0 ** (attempts - 1), LAST_RETRY_S)
