"""One run: requests of its sessions in, uploads and committed checkpoints out, for writeback/."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from deepvm.errors import Corrupt
from deepvm.memnode.errors import RequestRefused
from deepvm.memnode.monitoring.counters import Counters
from deepvm.memnode.storage.arena import Arena, ArenaFull
from deepvm.memnode.storage.budgets import KeptDocuments, cost_of
from deepvm.memnode.storage.checkpoint import Checkpoint
from deepvm.memnode.storage.upload import Begin, Upload, too_large
from deepvm.store.base import Manifest, chunk_count
from deepvm.units import format_bytes

_PAST_SESSIONS = 256
_SUPERSEDED = 256  # uploads dropped for a later one since the last commit: late ranks get the reason
_BEGIN_S = 30.0
_MOST_SHARED = 16  # chunks of an upload for each block of the node, if most are shared


class Outlet(Protocol):
    """Where committed checkpoints are written back to."""

    def offer(self, run: Run, checkpoint: Checkpoint) -> None: ...
    def remember(self, run: Run) -> None: ...
    def forget(self, run: Run) -> None: ...
    def remove(self, run: Run, checkpoint: Checkpoint) -> None: ...
    def remove_durable(self, run: Run, step: int, deleted: Checkpoint | None) -> None: ...
    def make_room(self, run: Run) -> None: ...


class Run:
    """All changes of a run happen under its lock; receiving chunks into blocks does not need it."""

    def __init__(
        self, name: str, verifier: str, arena: Arena, outlet: Outlet, counters: Counters, kept: KeptDocuments
    ) -> None:
        self.name, self.verifier = name, verifier
        self.session: str | None = None
        self.past_sessions: deque[str] = deque(maxlen=_PAST_SESSIONS)
        self.uploads: dict[int, Upload] = {}
        self.checkpoints: dict[int, Checkpoint] = {}
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self.version = 0  # counts changes of its list of checkpoints and their states
        self._beginning = threading.Lock()
        self.users = 0  # connections that have it open
        self._superseded: dict[int, int] = {}  # step of a dropped upload -> the step that it was dropped for
        self._arena, self._outlet, self._counters, self._kept = arena, outlet, counters, kept

    @property
    def empty(self) -> bool:
        return not self.checkpoints and not self.uploads and not self.users

    def mark_changed(self) -> None:
        """Wake those that wait for a change of the list of checkpoints, or of a checkpoint's state."""
        with self._changed:
            self.version += 1
            self._changed.notify_all()

    def wait_for_change(self, version: int, timeout_s: float) -> None:
        """Wait while the list of checkpoints is still that of a version."""
        with self._changed:
            self._changed.wait_for(lambda: self.version != version, timeout_s)

    # --- sessions -------------------------------------------------------------------------------------------------

    def claim(self, session: str) -> None:
        """Give the run to a newer session; drop what the older one left unfinished."""
        with self.lock:
            if session == self.session:
                return
            if session in self.past_sessions:
                raise self.fenced(session)
            if self.session is not None:
                self.past_sessions.append(self.session)
            self.session = session
            why = RequestRefused("fenced", f"a newer session writes run {self.name!r} now")
            for upload in self.uploads.values():
                self._end(upload, why)
            self.uploads.clear()
            self._superseded.clear()
            self._outlet.remember(self)

    def fenced(self, session: str) -> RequestRefused:
        return RequestRefused(
            "fenced", f"a newer session writes run {self.name!r} now; session {session!r:.60} is over"
        )

    @contextmanager
    def writing(self, session: str | None) -> Iterator[None]:
        with self.lock:
            if session is None:
                raise RequestRefused("denied", f"run {self.name!r} was opened to read: open it with write=true")
            if session != self.session:
                raise self.fenced(session)
            yield

    # --- uploads --------------------------------------------------------------------------------------------------

    def begin(self, begin: Begin, session: str | None, *, buffers: int, room_s: float) -> Upload | None:
        """Begin or join an upload. Return None if it is committed already: some rank's last connection comes late."""
        if not self._beginning.acquire(timeout=_BEGIN_S):  # one by one: ranks that begin together reserve room once
            raise RequestRefused(
                "busy", f"others have been beginning an upload of run {self.name!r} for {_BEGIN_S:g} s"
            )
        try:
            return self._begin(begin, session, buffers, room_s)
        finally:
            self._beginning.release()

    def _begin(self, begin: Begin, session: str | None, buffers: int, room_s: float) -> Upload | None:
        with self.writing(session):
            before = self.checkpoints.get(begin.step)
            if (
                before is not None
                and begin.attempt
                and not begin.repair
                and before.saved_by == (session, begin.attempt)
            ):
                return None
            if begin.repair:
                self._end_up_to(begin.attempt)
            upload = self._joined(begin)
            if upload is not None:
                return upload
            self._check_superseded(begin.step)
            if begin.repair and self.uploads:
                saving = next(iter(self.uploads))
                raise RequestRefused("busy", f"step {saving} is being saved: step {begin.step} is repaired later")
            self._make_way(begin.step, buffers)
        chunks = begin.share.count(chunk_count(begin.size_bytes, self._arena.block_bytes))
        reserved = self._reserve(begin, chunks, room_s)
        with self.lock:
            if session != self.session:  # a newer session came meanwhile
                self._arena.unreserve(reserved)
                raise self.fenced(str(session))
            upload = Upload(self._arena, begin, self._kept, session=str(session), reserved=reserved, room_s=room_s)
            self.uploads[begin.step] = upload
            return upload

    def _end_up_to(self, attempt: int) -> None:
        """End uploads of abandoned attempts: some of their chunks may have arrived after this node was back."""
        for step, upload in list(self.uploads.items()):
            if 0 < upload.begin.attempt <= attempt:
                self._end(self.uploads.pop(step), RequestRefused("not-found", f"step {step} is over"))

    def _joined(self, begin: Begin) -> Upload | None:
        """Join the upload under way; a later attempt of the same step ends it and begins anew."""
        upload = self.uploads.get(begin.step)
        if upload is None:
            return None
        if begin.attempt > upload.begin.attempt:
            self._end(self.uploads.pop(begin.step), RequestRefused("not-found", f"step {begin.step} began anew"))
            return None
        upload.join(begin)
        return upload

    def _make_way(self, step: int, buffers: int) -> None:
        """Before an upload begins, keep at most ``buffers`` checkpoints with it, among them the newest whole one."""
        while len(self.uploads) > max(0, buffers - 2):
            oldest = next(iter(self.uploads))
            self._superseded[oldest] = step
            if len(self._superseded) > _SUPERSEDED:
                del self._superseded[next(iter(self._superseded))]
            self._end(self.uploads.pop(oldest), _superseded(oldest, step))
        self.trim(max(1, buffers - 1 - len(self.uploads)))

    def _check_superseded(self, step: int) -> None:
        later = self._superseded.get(step)
        if later is not None:
            raise _superseded(step, later)

    def trim(self, keep: int) -> None:
        """Free the memory of the oldest checkpoints; those in the spill directory can still be read."""
        oldest = [found for found in self.in_order() if found.in_memory][:-keep]
        for found in oldest:
            found.evict()
            if found.copy is None:
                del self.checkpoints[found.step]
        if oldest:
            self.mark_changed()

    def in_order(self) -> list[Checkpoint]:
        """Return the checkpoints in the order of their commits; after a roll-back the last may have a lower step."""
        return sorted(self.checkpoints.values(), key=lambda found: found.order)

    def _reserve(self, begin: Begin, chunks: int, room_s: float) -> int:
        """Reserve blocks for the chunks; none if there is too little room and most of them will be shared."""
        if begin.partial_reservation and chunks > _MOST_SHARED * self._arena.blocks:
            raise too_large(begin, self._arena)
        try:
            self._arena.reserve(chunks, timeout_s=0 if begin.partial_reservation else room_s)
            return chunks
        except ArenaFull:
            self._outlet.make_room(self)
        try:
            self._arena.reserve(chunks, timeout_s=0 if begin.partial_reservation else room_s / 4)
            return chunks
        except ArenaFull as error:
            if begin.partial_reservation:
                return 0
            if chunks > self._arena.blocks:
                raise too_large(begin, self._arena) from None
            block = self._arena.block_bytes
            raise RequestRefused(
                "no-room",
                f"step {begin.step} needs {format_bytes(error.needed * block)}, {format_bytes(error.free * block)} of "
                f"{format_bytes(self._arena.capacity_bytes)} are free",
            ) from None

    def upload(self, step: int, session: str | None) -> Upload:
        upload = self.uploads.get(step)
        if upload is not None and upload.session == session:
            return upload
        with self.writing(session):
            self._check_superseded(step)
            raise RequestRefused("not-found", f"no upload of step {step} is under way: BEGIN comes first")

    def abort(self, step: int, session: str | None, last_attempt: int) -> None:
        """End the upload, unless it is of a later attempt than the client knows of."""
        with self.writing(session):
            self._superseded.pop(step, None)
            upload = self.uploads.get(step)
            if upload is not None and upload.begin.attempt <= last_attempt:
                del self.uploads[step]
                self._end(upload, RequestRefused("not-found", f"step {step} was aborted"))

    def _end(self, upload: Upload, why: RequestRefused) -> None:
        self._counters.add(aborts=1)
        upload.end(why)

    def drop_idle(self, idle_s: float) -> None:
        with self.lock:
            for step, upload in list(self.uploads.items()):
                if not upload.receiving and time.monotonic() - upload.touched_s > idle_s:
                    del self.uploads[step]
                    self._end(upload, RequestRefused("not-found", f"step {step} was idle for {idle_s:g} s: dropped"))

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def publish(self, step: int, document: bytes, index: int, session: str | None, *, buffers: int) -> Checkpoint:
        with self.writing(session):
            before = self.checkpoints.get(step)
            if step not in self.uploads and before is not None and before.document == document:
                return before  # the answer to the first PUBLISH was lost
            self.upload(step, session).check_manifest_length(len(document))
        try:
            manifest = Manifest.from_bytes(document)  # not under the lock: a large one takes a while
        except Corrupt as error:
            raise RequestRefused("failed", str(error)) from None
        if manifest.run != self.name or manifest.step != step:
            raise RequestRefused("failed", f"the manifest is of run {manifest.run!r}, step {manifest.step}")
        share = manifest.share(index)
        if not 0 <= index < share.nodes or not 1 <= share.replicas <= share.nodes:
            raise RequestRefused("failed", f"node {index} of {share.nodes} with {share.replicas} replicas")
        with self.writing(session):
            before = self.checkpoints.get(step)
            upload = self.upload(step, session)
            size = upload.begin.size_bytes
            if manifest.size_bytes != size or manifest.chunk_bytes != self._arena.block_bytes:
                raise RequestRefused(
                    "failed",
                    f"the manifest has {manifest.size_bytes} bytes in chunks of {manifest.chunk_bytes}, "
                    f"the upload has {size} in chunks of {self._arena.block_bytes}",
                )
            self.keep_document(manifest, document)
            try:
                blocks = upload.hand_over(manifest, share)
            except BaseException:
                self._kept.drop(cost_of(manifest, document))
                raise
            del self.uploads[step]
            self._superseded.clear()
            checkpoint = Checkpoint(self._arena, manifest, document, share=share, blocks=blocks)
            self.release_with(checkpoint)
            checkpoint.saved_by = (session, upload.begin.attempt)
            checkpoint.order = self._order(manifest, repair=upload.begin.repair)
            self.checkpoints[step] = checkpoint
            if before is not None:
                before.delete()
                before.evict()
            self.trim(buffers)
            self._counters.add(saves=1)
            self.mark_changed()
            self._outlet.offer(self, checkpoint)
            more = max(0, buffers - sum(found.in_memory for found in self.checkpoints.values()))
        self._arena.prefault(self._arena.used + more * upload.taken)  # the next saves will take as many again
        return checkpoint

    def keep_document(self, manifest: Manifest, document: bytes, *, force: bool = False) -> None:
        self._kept.add(cost_of(manifest, document), f"the manifest of step {manifest.step}", force=force)

    def release_with(self, checkpoint: Checkpoint) -> None:
        """Free the manifest's memory when nothing refers to the checkpoint any more."""
        weakref.finalize(checkpoint, self._kept.drop, cost_of(checkpoint.manifest, checkpoint.document))

    def _order(self, manifest: Manifest, *, repair: bool) -> int:
        """Return a checkpoint's place in the order of commits; a repaired one gets the place that it had before."""
        if repair:
            newer = [  # by time alone, a clock that was set back would make it the oldest, evicted first
                found for found in self.checkpoints.values()
                if found.manifest.created_s > manifest.created_s and found.step > manifest.step
            ]  # fmt: skip
            return max((found.order for found in self.checkpoints.values() if found not in newer), default=0)
        return max((found.order for found in self.checkpoints.values()), default=0) + 1

    def checkpoint(self, step: int) -> Checkpoint:
        found = self.checkpoints.get(step)
        if found is None:
            raise RequestRefused("not-found", f"run {self.name!r} has no checkpoint of step {step} here")
        return found

    def delete(self, step: int, session: str | None, *, leftover: bool = False) -> None:
        """Delete a checkpoint. A client with the key needs no session, so that a tool does not take a trainer's run.
        As a ``leftover`` of a commit that failed, it is kept if a whole copy proves that it was committed; else nothing
        of it is in the durable store. Raise if the durable store may still have it."""
        with self.lock:
            if session is not None and session != self.session:
                raise self.fenced(session)
            found = self.checkpoints.get(step)
            if leftover and found is not None and (found.whole or found.durable):
                return
            if found is not None:
                del self.checkpoints[step]
                found.delete()
                self._outlet.remove(self, found)
                found.evict()
                self.mark_changed()
        if not leftover:
            self._outlet.remove_durable(self, step, found)  # without the lock: a bucket may take a while


def _superseded(step: int, later: int) -> RequestRefused:
    return RequestRefused("failed", f"step {step} was not finished before step {later} began: it is dropped")
