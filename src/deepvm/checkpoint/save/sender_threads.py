"""The threads and connections that bring chunks to one memory node. Nothing here is waited for by the trainer."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from deepvm.checkpoint.buffers.priority import lower_priority
from deepvm.checkpoint.save.dedup import AT_ONCE, link_known
from deepvm.errors import NotFound, StoreUnavailable
from deepvm.protocol.frames import Kind
from deepvm.store.base import chunk_span
from deepvm.store.memory.connection import Connection, Send
from deepvm.store.memory.store import MemoryStore
from deepvm.store.memory.upload import begin, pack_kept

PUT_AT_ONCE = 8  # chunks of one frame: they cost little more than the last of them would alone
KEPT_AT_ONCE = 256  # a node that has them on disk only reads them back before it answers


class Chunks(Protocol):
    """Where the bytes of a save are, chunk by chunk: a snapshot, or a part of the state."""

    def digest(self, chunk: int) -> int: ...

    def hand_over(self, chunk: int, offset: int, send: Send) -> int:
        """Call ``send`` with the memory of a chunk from an offset on, while nothing moves or changes it."""
        ...

    def sent(self, chunk: int) -> None:
        """One node has the chunk."""
        ...

    def readable(self, chunk: int) -> bool:
        """Whether the chunk's bytes are still those of the save."""
        ...


@dataclass(frozen=True, kw_only=True)
class Base:
    """The last checkpoint that was committed: what has its digest there need not be sent again."""

    step: int
    fingerprint: str
    header_bytes: int
    digests: Sequence[int]
    changing: frozenset[int] = frozenset()  # chunks that were not as in the checkpoint before it


@dataclass(kw_only=True)
class RankJob:
    """One save, as the senders of one node see it."""

    source: Chunks
    step: int
    size_bytes: int
    chunk_bytes: int
    layout: str
    base: Base | None
    digests: list[int]
    waiting: queue.SimpleQueue[int | None]
    senders: int
    attempt: int = 0
    offering: bool = False  # what the node may have already, whatever its step and run
    partial_reservation: bool = False  # begin though there may be no room for all of it
    begun: threading.Event = field(default_factory=threading.Event)  # some sender has, or could not
    finished: threading.Event = field(default_factory=threading.Event)
    failure: BaseException | None = None
    bytes_sent: int = 0
    bytes_kept: int = 0
    bytes_offered: int = 0
    bytes_linked: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def length(self, chunk: int) -> int:
        return chunk_span(chunk, self.size_bytes, self.chunk_bytes)[1]

    def likely_changed(self, chunk: int) -> bool:
        """Whether it hardly pays to look first. Only asked of chunks that nobody has hashed yet."""
        return not self.digests[chunk] and (self.base is None or chunk in self.base.changing)

    def next(self, most: int, before_waiting: Callable[[], None]) -> list[int]:
        """The chunks that a sender deals with next: none at the end, and so many at most that others have some, too."""
        taken: list[int] = []
        try:
            chunk = self.waiting.get_nowait()
        except queue.Empty:
            before_waiting()
            chunk = self.waiting.get()
        most = min(most, 1 + self.waiting.qsize() // (2 * max(1, self.senders)))
        while chunk is not None:
            taken.append(chunk)
            if len(taken) >= most:
                return taken
            try:
                chunk = self.waiting.get_nowait()
            except queue.Empty:
                return taken
        self.waiting.put(None)  # for whoever asks next
        return taken


class Senders:
    """The threads and connections to one memory node; they stay between saves."""

    def __init__(self, store: MemoryStore, node: str, run: str, rank: int, world_size: int) -> None:
        self.node = node
        self._store, self._run, self._rank, self._world_size = store, run, rank, world_size
        self._jobs: list[queue.SimpleQueue[RankJob | None]] = [queue.SimpleQueue() for _ in range(store.connections)]
        self._threads = [
            threading.Thread(target=self._work, args=(jobs,), name=f"deepvm-send-{node}-{i}", daemon=True)
            for i, jobs in enumerate(self._jobs)
        ]
        self._open: set[Connection] = set()
        for thread in self._threads:
            thread.start()

    def start(self, job: RankJob) -> None:
        job.senders = len(self._jobs)
        for jobs in self._jobs:
            jobs.put(job)

    def interrupt(self) -> None:
        """Whatever is being sent ends with an error."""
        for connection in list(self._open):
            connection.interrupt()

    def close(self) -> None:
        self.interrupt()
        for jobs in self._jobs:
            jobs.put(None)
        for thread in self._threads:
            thread.join(5.0)

    def _work(self, jobs: queue.SimpleQueue[RankJob | None]) -> None:
        lower_priority()  # training keeps its cores; what is not sent in time is copied instead
        connection: Connection | None = None
        while True:
            job = jobs.get()
            if job is None:
                break
            try:
                if job.failure is None:
                    connection = self._begin(connection, job)
                    job.begun.set()
                    self._serve(connection, job)
            except BaseException as error:
                self._close(connection)
                connection = None
                with job.lock:
                    job.failure = job.failure or error
            job.begun.set()
            with job.lock:
                job.senders -= 1
                if job.senders == 0:
                    job.finished.set()
            del job  # and the snapshot with it
        self._close(connection)

    def _close(self, connection: Connection | None) -> None:
        if connection is not None:
            self._open.discard(connection)
            connection.close()

    def _begin(self, connection: Connection | None, job: RankJob) -> Connection:
        """Begin the save, on a new connection where the old one died unnoticed between saves."""
        if self._store.health.can_spare(self.node):
            self._store.health.check(self.node)
        if connection is not None:
            try:
                self._tell(connection, job)
                return connection
            except StoreUnavailable:
                if not connection.broken:
                    raise
                self._close(connection)
        connection = self._store.connect(self.node, self._run, write=True)
        self._open.add(connection)
        try:
            self._tell(connection, job)
        except BaseException:
            self._close(connection)
            raise
        return connection

    def _tell(self, connection: Connection, job: RankJob) -> None:
        begin(
            connection, job.step, job.size_bytes, job.chunk_bytes,
            layout=job.layout, rank=self._rank, world_size=self._world_size,
            attempt=job.attempt, share=self._store.share_of(self.node), partial_reservation=job.partial_reservation,
        )  # fmt: skip

    def _serve(self, connection: Connection, job: RankJob) -> None:
        kept: list[int] = []
        at_once = AT_ONCE if job.offering else PUT_AT_ONCE
        while (chunks := job.next(at_once, connection.flush)) and job.failure is None:
            changed: list[int] = []
            for chunk in chunks:
                if not job.offering and job.likely_changed(chunk):  # hashed while it is sent
                    changed.append(chunk)
                    continue
                job.digests[chunk] = digest = job.digests[chunk] or job.source.digest(chunk)
                same = job.base is not None and job.base.digests[chunk] == digest
                (kept if same else changed).append(chunk)
            if changed and job.offering:
                changed = self._link(connection, job, changed)
            self._put(connection, job, changed)
        connection.finish()
        for start in range(0, len(kept), KEPT_AT_ONCE):
            if job.failure is None:
                self._keep(connection, job, kept[start : start + KEPT_AT_ONCE])

    def _link(self, connection: Connection, job: RankJob, chunks: list[int]) -> list[int]:
        """Share what the node has already; the chunks that it has not."""
        connection.finish()  # answers come in order
        linked = set(link_known(connection, job.source, job.step, chunks, job.digests))
        for chunk in linked:
            job.source.sent(chunk)
        with job.lock:
            job.bytes_offered += sum(map(job.length, chunks))
            job.bytes_linked += sum(map(job.length, linked))
        return [chunk for chunk in chunks if chunk not in linked]

    def _put(self, connection: Connection, job: RankJob, chunks: Sequence[int]) -> None:
        for start in range(0, len(chunks), PUT_AT_ONCE):
            some = chunks[start : start + PUT_AT_ONCE]
            lengths, digests = [job.length(chunk) for chunk in some], [job.digests[chunk] for chunk in some]
            for chunk, digest in connection.put_several(job.step, some, lengths, digests, job.source.hand_over):
                job.digests[chunk] = digest
                job.source.sent(chunk)
            with job.lock:
                job.bytes_sent += sum(lengths)

    def _keep(self, connection: Connection, job: RankJob, kept: list[int]) -> None:
        assert job.base is not None  # noqa: S101 - nothing is kept without a base
        try:
            connection.call(
                Kind.KEEP,
                {"step": job.step, "from_step": job.base.step},
                pack_kept(kept, [job.digests[chunk] for chunk in kept]),
            )
        except NotFound:  # the node no longer has the base: send after all what can still be read
            if not all(map(job.source.readable, kept)):
                raise
            self._put(connection, job, kept)
            connection.finish()
            return
        for chunk in kept:
            job.source.sent(chunk)
            with job.lock:
                job.bytes_kept += job.length(chunk)
