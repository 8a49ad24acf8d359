"""The threads and connections that send chunks to one memory node. The trainer never waits for them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from deepvm.checkpoint.buffers.priority import lower_priority
from deepvm.errors import NotFound, StoreUnavailable
from deepvm.protocol import frames
from deepvm.protocol.frames import Kind
from deepvm.store.base import chunk_count, chunk_span
from deepvm.store.memory.buffers import BufferGroup, views_of
from deepvm.store.memory.connection import Connection, Send
from deepvm.store.memory.store import MemoryStore
from deepvm.store.memory.upload import begin, link, offer, pack_kept

OFFER_AT_ONCE = 32  # chunks of one offer: they are read twice, and far more would delay the first byte
PUT_AT_ONCE = 8  # chunks of one frame: they cost little more than the last of them would alone
KEPT_AT_ONCE = 256  # a node that has them on disk only reads them back before it answers


class ChunkSource(Protocol):
    """Where the bytes of a save are, chunk by chunk: a snapshot, or a part of the state."""

    def digest(self, chunk: int) -> int: ...

    def hand_over(self, chunk: int, offset: int, send: Send) -> int:
        """Call ``send`` with the memory of a chunk from an offset on, while nothing moves or changes it."""
        ...

    def sent(self, chunk: int) -> None:
        """Count the chunk as sent to one node."""
        ...

    def readable(self, chunk: int) -> bool:
        """True if the chunk's bytes are still those of the save."""
        ...


@dataclass(frozen=True, kw_only=True)
class Base:
    """The last checkpoint that was committed: what has its digest there need not be sent again."""

    step: int
    layout: str  # its fingerprint
    digests: Sequence[int]
    changing: frozenset[int] = frozenset()  # chunks that were not as in the checkpoint before it


@dataclass(kw_only=True)
class Upload:
    """The chunks of one save that this rank sends, the same for all memory nodes."""

    source: ChunkSource
    step: int
    size_bytes: int  # of the whole checkpoint
    chunk_bytes: int
    layout: str  # its fingerprint
    base: Base | None
    attempt: int = 0
    offering: bool = False  # what the node may have already, whatever its step and run
    partial_reservation: bool = False  # begin even if the node has no room for all of it
    digests: list[int] = field(init=False)  # by chunk; 0 if not known yet

    def __post_init__(self) -> None:
        self.digests = [0] * chunk_count(self.size_bytes, self.chunk_bytes)

    def begin(self, connection: Connection, store: MemoryStore, rank: int, world_size: int) -> None:
        """Begin or join the upload at one node."""
        begin(
            connection, self.step, self.size_bytes, self.chunk_bytes,
            layout=self.layout, rank=rank, world_size=world_size, attempt=self.attempt,
            share=store.share_of(connection.address), partial_reservation=self.partial_reservation,
        )  # fmt: skip

    def length(self, chunk: int) -> int:
        return chunk_span(chunk, self.size_bytes, self.chunk_bytes)[1]

    def likely_changed(self, chunk: int) -> bool:
        """True if hashing a chunk before it is sent hardly pays: no sender has hashed it, and it changed last time."""
        return not self.digests[chunk] and (self.base is None or chunk in self.base.changing)


@dataclass
class NodeUpload:
    """One upload, as the senders of one node see it."""

    upload: Upload
    waiting: queue.SimpleQueue[int | None] = field(default_factory=queue.SimpleQueue)  # chunks; None: no more
    senders: int = 0
    begun: threading.Event = field(default_factory=threading.Event)  # some sender has, or could not
    finished: threading.Event = field(default_factory=threading.Event)
    failure: BaseException | None = None
    bytes_sent: int = 0
    bytes_kept: int = 0
    bytes_offered: int = 0
    bytes_linked: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fail(self, error: BaseException) -> None:
        with self.lock:
            self.failure = self.failure or error

    def next(self, most: int, before_waiting: Callable[[], None]) -> list[int]:
        """Take the next chunks for a sender: none at the end, ``most`` at most, and not all that are left."""
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
        self.waiting.put(None)  # for the next sender
        return taken


class Senders:
    """The threads and connections to one memory node; they stay between saves."""

    def __init__(self, store: MemoryStore, node: str, run: str, rank: int, world_size: int) -> None:
        self.node = node
        self._store, self._run, self._rank, self._world_size = store, run, rank, world_size
        self._jobs: list[queue.SimpleQueue[NodeUpload | None]] = [queue.SimpleQueue() for _ in range(store.connections)]
        self._threads: list[threading.Thread] = []  # with the first save
        self._open: set[Connection] = set()

    def start(self, job: NodeUpload) -> None:
        for i, jobs in enumerate(self._jobs if not self._threads else ()):
            name = f"deepvm-send-{self.node}-{i}"
            self._threads.append(threading.Thread(target=self._work, args=(jobs,), name=name, daemon=True))
            self._threads[-1].start()
        job.senders = len(self._jobs)
        for jobs in self._jobs:
            jobs.put(job)

    def interrupt(self) -> None:
        """End with an error what is being sent."""
        for connection in list(self._open):
            connection.interrupt()

    def close(self) -> None:
        self.interrupt()
        for jobs in self._jobs:
            jobs.put(None)
        for thread in self._threads:
            thread.join(5.0)

    def _work(self, jobs: queue.SimpleQueue[NodeUpload | None]) -> None:
        lower_priority()  # training keeps its cores; what is not sent in time is copied instead
        connection: Connection | None = None
        while (job := jobs.get()) is not None:
            try:
                if job.failure is None:
                    connection = self._begin(connection, job)
                    job.begun.set()
                    self._serve(connection, job)
            except BaseException as error:
                self._close(connection)
                connection = None
                job.fail(error)
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

    def _begin(self, connection: Connection | None, job: NodeUpload) -> Connection:
        """Begin the save, on a new connection if the old one broke between saves."""
        if self._store.health.can_spare(self.node):
            self._store.health.check(self.node)
        while True:
            was_idle = connection is not None
            if connection is None:
                connection = self._store.connect(self.node, self._run, write=True)
                self._open.add(connection)
            try:
                job.upload.begin(connection, self._store, self._rank, self._world_size)
                return connection
            except BaseException as error:
                again = was_idle and connection.broken and isinstance(error, StoreUnavailable)
                self._close(connection)
                if not again:
                    raise
                connection = None

    def _serve(self, connection: Connection, job: NodeUpload) -> None:
        kept: list[int] = []
        upload, digests = job.upload, job.upload.digests
        at_once = OFFER_AT_ONCE if upload.offering else PUT_AT_ONCE
        while (chunks := job.next(at_once, connection.flush)) and job.failure is None:
            changed: list[int] = []
            for chunk in chunks:
                if not upload.offering and upload.likely_changed(chunk):  # hashed while it is sent
                    changed.append(chunk)
                    continue
                digests[chunk] = digest = digests[chunk] or upload.source.digest(chunk)
                same = upload.base is not None and upload.base.digests[chunk] == digest
                (kept if same else changed).append(chunk)
            if changed and upload.offering:
                changed = self._link(connection, job, changed)
            self._put(connection, job, changed)
        connection.finish()
        for start in range(0, len(kept), KEPT_AT_ONCE):
            if job.failure is None:
                self._keep(connection, job, kept[start : start + KEPT_AT_ONCE])

    def _link(self, connection: Connection, job: NodeUpload, chunks: list[int]) -> list[int]:
        """Share the chunks that the node has already; return the others."""
        connection.finish()  # answers come in order
        linked = set(_link_known(connection, job.upload, chunks))
        for chunk in linked:
            job.upload.source.sent(chunk)
        with job.lock:
            job.bytes_offered += sum(map(job.upload.length, chunks))
            job.bytes_linked += sum(map(job.upload.length, linked))
        return [chunk for chunk in chunks if chunk not in linked]

    def _put(self, connection: Connection, job: NodeUpload, chunks: Sequence[int]) -> None:
        upload = job.upload
        for start in range(0, len(chunks), PUT_AT_ONCE):
            some = chunks[start : start + PUT_AT_ONCE]
            lengths, digests = [upload.length(chunk) for chunk in some], [upload.digests[chunk] for chunk in some]
            for chunk, digest in connection.put_several(upload.step, some, lengths, digests, upload.source.hand_over):
                upload.digests[chunk] = digest
                upload.source.sent(chunk)
            with job.lock:
                job.bytes_sent += sum(lengths)

    def _keep(self, connection: Connection, job: NodeUpload, kept: list[int]) -> None:
        upload = job.upload
        assert upload.base is not None  # noqa: S101 - nothing is kept without a base
        meta = {"step": upload.step, "from_step": upload.base.step}
        try:
            connection.call(Kind.KEEP, meta, pack_kept(kept, [upload.digests[chunk] for chunk in kept]))
        except NotFound:  # the node no longer has the base: send what can still be read
            if not all(map(upload.source.readable, kept)):
                raise
            self._put(connection, job, kept)
            connection.finish()
            return
        for chunk in kept:
            upload.source.sent(chunk)
        with job.lock:
            job.bytes_kept += sum(map(upload.length, kept))


def _link_known(connection: Connection, upload: Upload, chunks: Sequence[int]) -> list[int]:
    """Offer chunks, prove the content of those that the node may have, and return those that it shares now."""
    candidates = set(offer(connection, upload.step, chunks, [upload.digests[chunk] for chunk in chunks]))
    known = [chunk for chunk in chunks if chunk in candidates]
    if not known:
        return []
    key = frames.content_key(*connection.nonces)
    proofs = [_proof(upload.source, chunk, key) for chunk in known]
    return link(connection, upload.step, known, [upload.digests[chunk] for chunk in known], proofs)


def _proof(source: ChunkSource, chunk: int, key: bytes) -> bytes:
    proof = b""

    def prove(groups: Iterable[BufferGroup]) -> int:
        nonlocal proof
        proof = frames.content_proof(key, views_of(groups))
        return 0

    source.hand_over(chunk, 0, prove)
    return proof
