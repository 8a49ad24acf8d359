"""One way on for committed checkpoints, in a thread of its own: newest first, retried, never in a save's way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from deepvm.errors import StoreError
from deepvm.memnode.monitoring.log import Log
from deepvm.memnode.storage.checkpoint import Checkpoint
from deepvm.memnode.storage.run import Run
from deepvm.memnode.writeback.chunk_source import ChunkSource, Superseded

FIRST_RETRY_S, LAST_RETRY_S = 0.25, 60.0
ANSWER_S = 0.002  # a writer that begins at once takes the processor from the answer to whoever committed


class Sink(Protocol):
    @property
    def name(self) -> str: ...
    def wants(self, checkpoint: Checkpoint) -> bool: ...
    def write(self, run: Run, checkpoint: Checkpoint, source: ChunkSource) -> None: ...
    def remove(self, run: Run, checkpoint: Checkpoint) -> None: ...
    def close(self) -> None: ...


@dataclass
class _Job:
    run: Run
    checkpoint: Checkpoint
    work: Callable[[], None]
    key: str  # a run's name: its newest checkpoint is to be written; with a slash: one is to be removed
    not_before_s: float = 0.0
    attempts: int = 0


class WritebackWorker:
    """At most one checkpoint of each run waits: a newer one takes the older one's place, which counts as skipped."""

    def __init__(self, sink: Sink, log: Log, make_source: Callable[[Run, Checkpoint], ChunkSource]) -> None:
        self.sink, self._log, self._make_source = sink, log, make_source
        self.written = self.skipped = self.failures = 0
        self.last_error: str | None = None
        self._jobs: dict[str, _Job] = {}
        self._changed = threading.Condition()
        self._busy = self._closed = self._hurry = False
        self._source: ChunkSource | None = None
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
            begins_s = time.monotonic() + ANSWER_S
            self._jobs[run.name] = _Job(run, checkpoint, lambda: self._write(run, checkpoint), run.name, begins_s)
            self._changed.notify_all()

    def remove(self, run: Run, checkpoint: Checkpoint) -> None:
        """The checkpoint is deleted (and marked so): whatever is here of it goes, too."""
        with self._changed:
            key = f"{run.name}/{checkpoint.step}"
            self._jobs[key] = _Job(run, checkpoint, lambda: self.sink.remove(run, checkpoint), key)
            self._changed.notify_all()

    def make_room(self, run: Run) -> None:
        """A save finds no room: give up what is held of a checkpoint that has left memory, but not twice in a row
        where that means to begin again with a newer one, or a slow disk would never have a whole one."""
        with self._changed:
            source, newer = self._source, run.name in self._jobs
        if source is not None and source.let_go(abandon=newer and not self._abandoned):
            self._log.warning("made room", worker=self.sink.name, step=source.checkpoint.step)

    @property
    def waiting(self) -> int:
        return len(self._jobs) + self._busy

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
        """Wait until everything is written, retrying at once what failed; tells whether it is."""
        with self._changed:
            self._hurry = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self.waiting, max(0.0, deadline - time.monotonic()))

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
                self._busy = True
            try:
                self._attempt(job)
            finally:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()

    def _next(self) -> _Job | None:
        while not self._closed:
            now, soonest = time.monotonic(), 60.0
            for key in reversed(self._jobs):
                left = self._jobs[key].not_before_s - now
                if self._hurry:
                    left = min(left, FIRST_RETRY_S)
                if left <= 0:
                    return self._jobs.pop(key)
                soonest = min(soonest, left)
            self._changed.wait(soonest)
        return None

    def _attempt(self, job: _Job) -> None:
        job.attempts += 1
        try:
            job.work()
        except Superseded:
            self.skipped += 1
        except Exception as error:  # a worker that dies would lose checkpoints silently
            told = str(error) if isinstance(error, (StoreError, OSError)) else f"{type(error).__name__}: {error}"
            self.failures += 1
            self.last_error = told
            self._log.error(
                self.sink.name, run=job.run.name, step=job.checkpoint.step, attempt=job.attempts, error=told
            )
            self._retry(job)
        else:
            self.last_error = None

    def _retry(self, job: _Job) -> None:
        with self._changed:
            removal = "/" in job.key
            if job.key in self._jobs or (job.checkpoint.is_deleted() and not removal):
                self.skipped += not removal
                return
            wait_s = FIRST_RETRY_S if self._hurry else min(FIRST_RETRY_S * 2 ** (job.attempts - 1), LAST_RETRY_S)
            job.not_before_s = time.monotonic() + wait_s
            self._jobs[job.key] = job

    def _write(self, run: Run, checkpoint: Checkpoint) -> None:
        if checkpoint.is_deleted():
            return
        started_s = time.monotonic()
        try:
            with self._make_source(run, checkpoint) as source:
                self._source = source
                self.sink.write(run, checkpoint, source)
        except Superseded:
            self._abandoned = True
            raise
        finally:
            self._source = None
        self._abandoned = False
        self.written += 1
        taken_s = round(time.monotonic() - started_s, 4)
        self._log.info(self.sink.name, run=run.name, step=checkpoint.step, taken_s=taken_s)
