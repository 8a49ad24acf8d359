"""Memory nodes as a store: ``memory://h1:7070,h2:7070?replicas=2``.

Chunk k lives on node k mod n, and its replicas on the nodes after it. Losing a node loses nothing as long as every
chunk has a replica left.
"""

from __future__ import annotations

import json
import secrets
import ssl
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TypeVar
from urllib.parse import parse_qs, urlsplit

import numpy as np
import xxhash

from deepvm.errors import Corrupt, NotFound, StoreError, StoreUnavailable, UsageError
from deepvm.memnode.wire import Kind
from deepvm.store.base import Manifest, check_run, chunk_count
from deepvm.store.connection import Connection, parse_address

T = TypeVar("T")


def home_nodes(chunk: int, nodes: int, replicas: int) -> list[int]:
    """The nodes that keep a chunk, its first home first."""
    return [(chunk + j) % nodes for j in range(min(replicas, nodes))]


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
        connection = Connection(node, token=self._token, tls=self._tls, pace_bytes_per_s=self._pace)
        try:
            if run is not None:
                connection.open(check_run(run), key=self._key, session=self.session, write=write)
        except BaseException:
            connection.close()
            raise
        return connection

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
            except NotFound:
                self._give_back(node, run, connection)
                raise
            except StoreUnavailable:
                connection.close()
                if not waited:
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

    def _each(self, nodes: Iterable[str], run: str | None, kind: Kind) -> list[dict[str, object]]:
        """The answers of the nodes that answer; the last error where none does."""
        answers, failure = [], None
        for node in nodes:
            try:
                answers.append(self._call(node, run, kind)[0])
            except StoreUnavailable as error:
                failure = error
        if not answers and failure is not None:
            raise failure
        return answers

    def runs(self) -> list[str]:
        return sorted({str(run) for answer in self._each(self.nodes, None, Kind.RUNS) for run in answer["runs"]})  # type: ignore[attr-defined]

    def steps(self, run: str) -> list[int]:
        """Steps whose manifest some node has, and whose every chunk some reachable node should have."""
        try:
            answers = self._each(self.nodes, run, Kind.STEPS)
        except NotFound:
            return []
        held: dict[int, int] = {}
        for answer in answers:
            for row in answer["steps"]:  # type: ignore[attr-defined]
                held[int(row["step"])] = held.get(int(row["step"]), 0) + 1
        least = len(self.nodes) - self.replicas + 1  # with fewer, some chunk has no node left
        return sorted(step for step, count in held.items() if count >= least)

    def states(self, run: str, step: int) -> list[str]:
        """What each reachable node says of a checkpoint: remote, spilled or durable."""
        found = []
        for answer in self._each(self.nodes, run, Kind.STEPS):
            found += [str(row["state"]) for row in answer["steps"] if row["step"] == step]  # type: ignore[attr-defined]
        return found

    def manifest(self, run: str, step: int) -> Manifest:
        failure: StoreError = NotFound(f"{self.url} has no step {step} of run {run}")
        for node in self.nodes:
            try:
                return Manifest.from_bytes(bytes(self._call(node, run, Kind.MANIFEST, {"step": step})[1]))
            except (StoreUnavailable, NotFound, Corrupt) as error:
                failure = error
        raise failure

    def read_chunk(self, manifest: Manifest, chunk: int, into: memoryview) -> None:
        failure: StoreError = NotFound(f"no node has chunk {chunk} of step {manifest.step}")
        nodes = manifest.nodes or self.nodes[:1]

        def get(connection: Connection) -> None:
            connection.read_into(Kind.GET, {"step": manifest.step, "chunk": chunk}, into)

        for home in home_nodes(chunk, len(nodes), manifest.replicas):
            try:
                self._ask(nodes[home], manifest.run, get)
                if xxhash.xxh3_64_intdigest(into) == manifest.digests[chunk]:
                    return
                failure = Corrupt(f"chunk {chunk} of step {manifest.step} is not what was saved")
            except (StoreUnavailable, NotFound, Corrupt) as error:
                failure = error
        raise failure

    def writer(self, run: str, step: int, *, size_bytes: int, chunk_bytes: int) -> MemoryWriter:
        return MemoryWriter(self, run, step, size_bytes=size_bytes, chunk_bytes=chunk_bytes)

    def delete(self, run: str, step: int) -> None:
        for node in self.nodes:
            with suppress(NotFound):
                connection = self.connect(node, run, write=True)
                try:
                    connection.call(Kind.DELETE, {"step": step})
                finally:
                    connection.close()

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
        self._store, self._run, self._step, self._size = store, run, step, size_bytes
        self._lock = threading.Lock()
        self._connections: list[Connection] = []
        self.chunk_bytes = chunk_bytes
        try:
            for node in store.nodes:
                connection = store.connect(node, run, write=True)
                self._connections.append(connection)
                begin(connection, step, size_bytes, chunk_bytes, layout="", rank=0, world_size=1)
        except BaseException:
            self.abort()
            raise

    def put(self, chunk: int, pieces: Sequence[memoryview], digest: int) -> None:
        store = self._store
        data = memoryview(pieces[0]) if len(pieces) == 1 else memoryview(b"".join(pieces))
        data = data.cast("B")
        for home in home_nodes(chunk, len(store.nodes), store.replicas):
            with self._lock:
                self._connections[home].put(
                    {"step": self._step, "chunk": chunk}, len(data), digest, lambda offset, send: send([data[offset:]])
                )

    def publish(self, manifest: Manifest) -> None:
        store = self._store
        with self._lock:
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
    connection: Connection, step: int, size_bytes: int, chunk_bytes: int, *, layout: str, rank: int, world_size: int
) -> None:
    if chunk_bytes != connection.block_bytes:
        raise UsageError(
            f"memory node {connection.address} keeps blocks of {connection.block_bytes} bytes, not of {chunk_bytes}"
        )
    connection.call(
        Kind.BEGIN,
        {"step": step, "size_bytes": size_bytes, "layout": layout, "rank": rank, "world_size": world_size},
    )


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
