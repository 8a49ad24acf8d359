"""Memory nodes as a store: ``memory://h1:7070,h2:7070?replicas=2``.

Chunk k lives on node k mod n, and its replicas on the nodes after it. Losing a node loses nothing as long as every
chunk has a replica left.
"""

from __future__ import annotations

import json
import logging
import secrets
import ssl
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar
from urllib.parse import parse_qs, urlsplit

import numpy as np
import xxhash

from deepvm.errors import Corrupt, NotFound, StoreError, StoreUnavailable, UsageError
from deepvm.memnode.wire import Kind
from deepvm.store.base import Manifest, check_run, chunk_count
from deepvm.store.chunks import Tally
from deepvm.store.connection import Connection, Send, parse_address

log = logging.getLogger("deepvm.store")

T = TypeVar("T")
DOWN_S = 5.0  # so long a node that took long not to answer is not asked again by readers
SLOW_S = 1.0


def home_nodes(chunk: int, nodes: int, replicas: int) -> list[int]:
    """The nodes that keep a chunk, its first home first."""
    return [(chunk + j) % nodes for j in range(min(replicas, nodes))]


def _least(nodes: int, replicas: int) -> int:
    """How many nodes must be left: with fewer, some chunk has none."""
    return max(1, nodes - replicas + 1)


def pack_kept(chunks: Sequence[int], digests: Sequence[int]) -> bytes:
    """The body of KEEP: chunk indices, then their digests, little-endian."""
    return np.asarray(chunks, "<u4").tobytes() + np.asarray(digests, "<u8").tobytes()


class MemoryStore:
    durable = False

    def __init__(
        self,
        nodes: Sequence[str],
        *,
        replicas: int = 1,
        connections: int = 2,
        token: str | None = None,
        key: str = "",
        session: str | None = None,
        tls: ssl.SSLContext | None = None,
        pace_bytes_per_s: int | None = None,
    ) -> None:
        if not nodes:
            raise UsageError("a memory store needs at least one node: memory://10.0.0.9:7070")
        if not 1 <= replicas <= len(nodes):
            raise UsageError(f"{replicas} replicas cannot be kept on {len(nodes)} memory node(s)")
        if not 1 <= connections <= 64:
            raise UsageError(f"{connections} connections to a memory node: it takes 1 to 64")
        for node in nodes:
            parse_address(node)
        self.nodes, self.replicas, self.connections = tuple(nodes), replicas, connections
        self.session = session or secrets.token_hex(8)
        self._token, self._key, self._tls, self._pace = token, key, tls, pace_bytes_per_s
        self._idle: dict[tuple[str, str], list[Connection]] = {}
        self._lock = threading.Lock()
        self._down: dict[str, tuple[float, StoreUnavailable]] = {}  # until when, and why

    @classmethod
    def from_url(cls, url: str, *, token: str | None = None, key: str | None = None) -> MemoryStore:
        parts = urlsplit(url)
        options = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        unknown = options.keys() - {"replicas", "connections", "pace", "tls"}
        if parts.path not in ("", "/") or unknown:
            what = f"option {sorted(unknown)[0]!r}" if unknown else f"path {parts.path!r}"
            raise UsageError(f"{url}: {what} is not known; write memory://h1:7070,h2:7070?replicas=2&connections=4")
        try:
            numbers = {name: int(options[name]) for name in ("replicas", "connections", "pace") if name in options}
        except ValueError:
            raise UsageError(f"{url}: replicas, connections and pace are whole numbers") from None
        return cls(
            [node for node in parts.netloc.split(",") if node],
            replicas=numbers.get("replicas", 1),
            connections=numbers.get("connections", 2),
            pace_bytes_per_s=numbers.get("pace"),
            token=token,
            key=key or "",
            tls=ssl.create_default_context(cafile=options["tls"] or None) if "tls" in options else None,
        )

    @property
    def url(self) -> str:
        return f"memory://{','.join(self.nodes)}" + (f"?replicas={self.replicas}" if self.replicas > 1 else "")

    # --- connections --------------------------------------------------------------------------------------------

    def connect(self, node: str, run: str | None, *, write: bool = False) -> Connection:
        """A connection of its own, opened for a run."""
        began = time.monotonic()
        try:
            connection = Connection(node, token=self._token, tls=self._tls, pace_bytes_per_s=self._pace)
        except StoreUnavailable as error:
            if time.monotonic() - began > SLOW_S:
                self._down[node] = time.monotonic() + DOWN_S, error
            raise
        self._down.pop(node, None)
        try:
            if run is not None:
                connection.open(check_run(run), key=self._key, session=self.session, write=write)
        except BaseException:
            connection.close()
            raise
        return connection

    def _is_down(self, node: str) -> bool:
        return node in self._down and self._down[node][0] > time.monotonic()

    def _call(
        self, node: str, run: str | None, kind: Kind, meta: dict[str, object] | None = None
    ) -> tuple[dict[str, object], bytearray]:
        return self._ask(node, run, lambda connection: connection.call(kind, meta))

    def _ask(self, node: str, run: str | None, question: Callable[[Connection], T]) -> T:
        """Ask over a connection that is kept for the next time. One that waited idle may have died unnoticed, so a
        failure on it is tried again on a new one; one that failed is closed, since something may be under way on it."""
        while True:
            connection, waited = self._take(node, run)
            try:
                answer = question(connection)
            except StoreError as error:
                if not connection.broken:  # it said no
                    self._give_back(node, run, connection)
                    raise
                connection.close()
                if not waited or not isinstance(error, StoreUnavailable):
                    raise
                continue
            except BaseException:
                connection.close()
                raise
            self._give_back(node, run, connection)
            return answer

    def _take(self, node: str, run: str | None) -> tuple[Connection, bool]:
        """A connection, and whether it waited idle."""
        with self._lock:
            idle = self._idle.get((node, run or ""))
            if idle:
                return idle.pop(), True
            if self._is_down(node):
                raise StoreUnavailable(str(self._down[node][1]))
        return self.connect(node, run), False

    def _give_back(self, node: str, run: str | None, connection: Connection) -> None:
        with self._lock:
            self._idle.setdefault((node, run or ""), []).append(connection)

    def close(self) -> None:
        with self._lock:
            for connections in self._idle.values():
                for connection in connections:
                    connection.close()
            self._idle.clear()

    # --- the contract -------------------------------------------------------------------------------------------

    def _each(
        self, run: str | None, kind: Kind, meta: dict[str, object] | None = None
    ) -> tuple[dict[str, tuple[dict[str, object], bytearray]], StoreError | None]:
        """The answers of the nodes that have one, and why another has none; that is raised where all have none."""
        answers: dict[str, tuple[dict[str, object], bytearray]] = {}
        failure: StoreError | None = None
        for node in self.nodes:
            try:
                answers[node] = self._call(node, run, kind, meta)
            except StoreError as error:
                failure = error if failure is None or isinstance(failure, NotFound) else failure
        if not answers and failure is not None:
            raise failure
        return answers, failure

    def runs(self) -> list[str]:
        answers, _ = self._each(None, Kind.RUNS)
        return sorted({str(run) for answer, _ in answers.values() for run in answer["runs"]})  # type: ignore[attr-defined]

    def steps(self, run: str) -> list[int]:
        """Steps whose manifest some node has, and whose every chunk some reachable node should have. Where there are
        none and a node does not answer, it may have them: that is no run without checkpoints."""
        held, failure = self._held(run)
        whole = sorted(step for step, nodes in held.items() if self._is_whole(run, step, nodes))
        if failure is not None and not whole:
            raise failure
        for step in sorted(held.keys() - set(whole)):
            if failure is not None and step > whole[-1]:
                log.warning("step %d of run %s is not whole while a node does not answer: %s", step, run, failure)
        return whole

    def share_of(self, node: str) -> dict[str, int]:
        """What a node is told of its part in a checkpoint."""
        return {"nodes": len(self.nodes), "node_index": self.nodes.index(node), "replicas": self.replicas}

    def half_steps(self, run: str) -> dict[int, list[str]]:
        """Steps that were being committed when their trainer ended, and the nodes that have them; none where a node
        does not answer, since it may have the other half."""
        held, failure = self._held(run)
        if failure is not None:
            return {}
        return {step: nodes for step, nodes in held.items() if not self._is_whole(run, step, nodes)}

    def _is_whole(self, run: str, step: int, holders: Sequence[str]) -> bool:
        """Whether every chunk has a node among those that have the manifest. The manifest tells among how many nodes
        it was shared, which need not be those of now."""
        for node in holders:
            with suppress(StoreError):
                document = self._call(node, run, Kind.MANIFEST, {"step": step})[1]
                manifest = Manifest.from_bytes(bytes(document))
                return len(holders) >= _least(len(manifest.nodes), manifest.replicas)
        return False

    def _held(self, run: str) -> tuple[dict[int, list[str]], StoreError | None]:
        answers, failure = self._each(run, Kind.STEPS)
        held: dict[int, list[str]] = {}
        for node, (answer, _) in answers.items():
            for row in answer["steps"]:  # type: ignore[attr-defined]
                held.setdefault(int(row["step"]), []).append(node)
        return held, failure

    def states(self, run: str, step: int) -> list[str]:
        """What each reachable node says of a checkpoint: remote, spilled or durable."""
        answers, _ = self._each(run, Kind.STEPS)
        rows = (row for answer, _ in answers.values() for row in answer["steps"])  # type: ignore[attr-defined]
        return [str(row["state"]) for row in rows if row["step"] == step]

    def outlives_the_nodes(self, states: Sequence[str]) -> bool:
        """Whether, of a checkpoint that the nodes speak of so, every chunk is on a disk or in object storage."""
        return "durable" in states or states.count("spilled") >= _least(len(self.nodes), self.replicas)

    def manifest(self, run: str, step: int) -> Manifest:
        return self._newest_manifest(run, step)[0]

    def _newest_manifest(self, run: str, step: int) -> tuple[Manifest, bytes]:
        """Of a step that was saved twice, a node that was away the second time has the first."""
        answers, failure = self._each(run, Kind.MANIFEST, {"step": step})
        found: list[tuple[Manifest, bytes]] = []
        for _, body in answers.values():
            try:
                found.append((Manifest.from_bytes(bytes(body)), bytes(body)))
            except Corrupt as error:
                failure = error
        if not found:
            raise failure or NotFound(f"{self.url} has no step {step} of run {run}")
        return max(found, key=lambda one: one[0].created_s)

    def read_chunk(self, manifest: Manifest, chunk: int, into: memoryview) -> None:
        """From the first node that has it as it was saved. A copy that is not is replaced, and said so."""
        nodes = manifest.nodes or self.nodes[:1]
        homes = [nodes[home] for home in home_nodes(chunk, len(nodes), manifest.replicas)]
        others = [node for node in nodes if node not in homes]  # one may have spilled all of it
        damaged: list[str] = []
        failure: StoreError | None = None
        for node in sorted([*homes, *others], key=lambda node: (self._is_down(node), node in others)):
            try:
                self._ask(node, manifest.run, _getting(manifest.step, chunk, into))
                if xxhash.xxh3_64_intdigest(into) != manifest.digests[chunk]:
                    raise Corrupt(f"chunk {chunk} of step {manifest.step} is not what was saved, at {node}")
            except StoreError as error:
                if isinstance(error, Corrupt):
                    damaged.append(node)
                if failure is None or not isinstance(error, NotFound):
                    failure = error
                continue
            for bad in damaged:
                self._mend(bad, manifest, chunk, into)
            return
        raise failure or NotFound(f"no node has chunk {chunk} of step {manifest.step}")

    def _mend(self, node: str, manifest: Manifest, chunk: int, good: memoryview) -> None:
        meta = {"step": manifest.step, "chunk": chunk}
        what = f"chunk {chunk} of step {manifest.step} of run {manifest.run} at {node} was damaged"
        try:
            self._ask(node, manifest.run, lambda connection: connection.call(Kind.MEND, meta, bytes(good)))
            log.warning("%s, and is replaced from a good copy", what)
        except StoreError as error:
            log.warning("%s, and cannot be replaced: %s", what, error)

    def repair(self, run: str, step: int, attempt: int = 0) -> list[str]:
        """Make the missing copies of a checkpoint again, on nodes that answer and do not have it; the nodes that have
        it now. Only for the session that writes the run, and refused while it saves: unless by an attempt that is
        known to be over, which are all up to ``attempt``."""
        manifest, document = self._newest_manifest(run, step)
        whole = []
        for index, node in enumerate(manifest.nodes):
            try:
                if bytes(self._call(node, run, Kind.MANIFEST, {"step": step})[1]) == document:
                    whole.append(node)
                    continue
            except NotFound:
                pass
            except StoreUnavailable:
                continue  # still away
            connection = self.connect(node, run, write=True)
            try:
                self._copy_share(connection, index, manifest, document, attempt)
            finally:
                connection.close()
            whole.append(node)
            log.warning("made the copy of step %d of run %s at %s again", step, run, node)
        return whole

    def _copy_share(
        self, connection: Connection, index: int, manifest: Manifest, document: bytes, attempt: int
    ) -> None:
        nodes, step = manifest.nodes, manifest.step
        share = {"nodes": len(nodes), "node_index": index, "replicas": manifest.replicas}
        begin(
            connection, step, manifest.size_bytes, manifest.chunk_bytes,
            layout="", rank=0, world_size=1, share=share, attempt=attempt, repair=True,
        )  # fmt: skip
        mine = [c for c in range(len(manifest.digests)) if index in home_nodes(c, len(nodes), manifest.replicas)]
        buffer = memoryview(bytearray(manifest.chunk_bytes))
        for chunk in mine:
            data = buffer[: manifest.span(chunk)[1]]
            self.read_chunk(manifest, chunk, data)
            connection.put({"step": step, "chunk": chunk}, len(data), manifest.digests[chunk], _sending(data))
            connection.finish()  # before the buffer is filled again
        if seal(connection, step, mine, 0.0) != [manifest.digests[chunk] for chunk in mine]:
            raise Corrupt(f"memory node {connection.address} holds other bytes than were sent")
        connection.call(Kind.PUBLISH, {"step": step, "node_index": index}, document)

    def writer(self, run: str, step: int, *, size_bytes: int, chunk_bytes: int) -> MemoryWriter:
        return MemoryWriter(self, run, step, size_bytes=size_bytes, chunk_bytes=chunk_bytes)

    def delete(self, run: str, step: int) -> None:
        """On every node that answers; raises for one that does not. Takes the run from nobody who writes it."""
        failure: StoreError | None = None
        for node in self.nodes:
            try:
                self._call(node, run, Kind.DELETE, {"step": step})
            except NotFound:
                pass
            except StoreError as error:
                failure = error
        if failure is not None:
            raise failure

    def extras(self, connection: Connection, step: int, world_size: int, timeout_s: float) -> list[object]:
        """Every rank's own state, as the ranks sent it to their first node."""
        _, body = connection.call(
            Kind.EXTRAS, {"step": step, "world_size": world_size, "timeout_s": timeout_s}, timeout_s=timeout_s
        )
        return list(json.loads(body))

    def status(self, node: str) -> dict[str, object]:
        return self._call(node, None, Kind.STATUS)[0]


class MemoryWriter:
    """The plain way into memory nodes, for tools and tests; the trainer's own way is in checkpoint/transfer.py."""

    def __init__(self, store: MemoryStore, run: str, step: int, *, size_bytes: int, chunk_bytes: int) -> None:
        self._store, self._step = store, step
        self._tally = Tally(run, step, size_bytes, chunk_bytes)
        self._lock = threading.Lock()
        self._connections: list[Connection] = []
        try:
            for node in store.nodes:
                connection = store.connect(node, run, write=True)
                self._connections.append(connection)
                begin(
                    connection,
                    step,
                    size_bytes,
                    chunk_bytes,
                    layout="",
                    rank=0,
                    world_size=1,
                    share=store.share_of(node),
                )
        except BaseException:
            self.abort()
            raise

    def put(self, chunk: int, pieces: Sequence[memoryview], digest: int) -> None:
        store = self._store
        data = memoryview(pieces[0]) if len(pieces) == 1 else memoryview(b"".join(pieces))
        data = data.cast("B")
        self._tally.span(chunk, len(data))
        for home in home_nodes(chunk, len(store.nodes), store.replicas):
            with self._lock:
                self._connections[home].put(
                    {"step": self._step, "chunk": chunk}, len(data), digest, lambda offset, send: send([data[offset:]])
                )
        self._tally.took(chunk, digest)

    def publish(self, manifest: Manifest) -> None:
        store = self._store
        self._tally.check(manifest)
        with self._lock:
            if not self._connections:
                raise StoreError(f"step {self._step} was aborted or published before")
            for connection in self._connections:
                connection.finish()
            seal_and_publish(
                self._connections,
                Manifest(
                    run=manifest.run,
                    step=manifest.step,
                    size_bytes=manifest.size_bytes,
                    chunk_bytes=manifest.chunk_bytes,
                    digests=manifest.digests,
                    created_s=manifest.created_s,
                    world_size=manifest.world_size,
                    nodes=store.nodes,
                    replicas=store.replicas,
                    facts=manifest.facts,
                ),
            )
        self._close()

    def abort(self) -> None:
        for connection in self._connections:
            with suppress(StoreError):
                connection.finish()
                connection.call(Kind.ABORT, {"step": self._step})
        self._close()

    def _close(self) -> None:
        for connection in self._connections:
            connection.close()
        self._connections = []


def begin(
    connection: Connection,
    step: int,
    size_bytes: int,
    chunk_bytes: int,
    *,
    layout: str,
    rank: int,
    world_size: int,
    attempt: int = 0,
    share: Mapping[str, int] | None = None,
    repair: bool = False,
) -> None:
    """``share``: nodes, node_index and replicas, where nodes share the chunks."""
    if chunk_bytes != connection.block_bytes:
        raise UsageError(
            f"memory node {connection.address} keeps blocks of {connection.block_bytes} bytes, not of {chunk_bytes}"
        )
    meta = {"step": step, "size_bytes": size_bytes, "layout": layout, "rank": rank, "world_size": world_size}
    connection.call(Kind.BEGIN, {**meta, **(share or {}), "attempt": attempt, "repair": repair})


def _getting(step: int, chunk: int, into: memoryview) -> Callable[[Connection], None]:
    return lambda connection: connection.read_into(Kind.GET, {"step": step, "chunk": chunk}, into)


def _sending(data: memoryview) -> Callable[[int, Send], int]:
    return lambda offset, send: send([data[offset:]])


def seal(connection: Connection, step: int, chunks: Sequence[int], timeout_s: float) -> list[int]:
    """Wait until a node has these chunks, from whatever rank; their digests."""
    body = np.asarray(chunks, "<u4").tobytes()
    _, digests = connection.call(Kind.SEAL, {"step": step, "timeout_s": timeout_s}, body, timeout_s=timeout_s)
    if len(digests) != 8 * len(chunks):
        raise Corrupt(f"memory node {connection.address} sealed {len(digests) // 8} chunks instead of {len(chunks)}")
    return list(struct.unpack(f"<{len(chunks)}Q", digests))


def seal_and_publish(connections: Sequence[Connection], manifest: Manifest, timeout_s: float = 60.0) -> None:
    """Every chunk at each of its homes, as the manifest says; then, last, the manifest at all of them."""
    nodes = len(connections)
    homes: list[list[int]] = [[] for _ in connections]
    for chunk in range(chunk_count(manifest.size_bytes, manifest.chunk_bytes)):
        for home in home_nodes(chunk, nodes, manifest.replicas):
            homes[home].append(chunk)
    for connection, chunks in zip(connections, homes, strict=True):
        found = seal(connection, manifest.step, chunks, timeout_s)
        if found != [manifest.digests[chunk] for chunk in chunks]:
            raise Corrupt(f"memory node {connection.address} holds other bytes than were sent")
    for index, connection in enumerate(connections):
        connection.call(Kind.PUBLISH, {"step": manifest.step, "node_index": index}, manifest.to_bytes())
