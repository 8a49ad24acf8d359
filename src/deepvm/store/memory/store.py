"""Memory nodes as a store: ``memory://h1:7070,h2:7070?replicas=2`` in, checkpoints in and out.

Losing a node loses nothing as long as every chunk has a replica left.
"""

from __future__ import annotations

import logging
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from deepvm.errors import Corrupt, NotFound, StoreError, StoreUnavailable, UsageError
from deepvm.protocol.addresses import split_address
from deepvm.protocol.credentials import client_tls
from deepvm.protocol.frames import Kind
from deepvm.protocol.placement import Share, minimum_nodes, replica_nodes
from deepvm.store.base import Manifest, Store, check_run
from deepvm.store.chunks import check_length, read_manifest
from deepvm.store.memory.answers import rank_states, run_names
from deepvm.store.memory.connection import CONNECT_S, Connection
from deepvm.store.memory.health import GREET_S, Health
from deepvm.store.memory.listing import RunListing
from deepvm.store.memory.upload import MemoryWriter
from deepvm.store.memory.watch import RunWatch

log = logging.getLogger("deepvm.store")

T = TypeVar("T")
SLOW_S = 1.0  # a node that is dead refuses at once; one that takes longer not to answer hangs


class MemoryStore(Store):
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
            raise UsageError(f"replicas is {replicas}: it must be from 1 to the number of memory nodes, {len(nodes)}")
        if not 1 <= connections <= 64:
            raise UsageError(f"connections is {connections}: it must be from 1 to 64 for each memory node")
        if pace_bytes_per_s is not None and not 1 <= pace_bytes_per_s < 2**31:  # the kernel takes a C int
            raise UsageError(f"pace is {pace_bytes_per_s}: it must be from 1 to {2**31 - 1} bytes per second")
        for node in nodes:
            split_address(node)
        self.nodes, self.replicas, self.connections = tuple(nodes), replicas, connections
        self.session = session or secrets.token_hex(8)
        self._token, self._key, self._tls, self._pace = token, key, tls, pace_bytes_per_s
        self._idle: dict[tuple[str, str], list[Connection]] = {}
        self._lock = threading.Lock()
        self.health = Health(self._greet, spare=replicas - 1)

    @classmethod
    def from_url(cls, url: str, *, token: str | None = None, key: str | None = None) -> MemoryStore:
        parts = urlsplit(url)
        options = _options(parts.query)
        unknown = options.keys() - {"replicas", "connections", "pace", "tls"}
        if parts.path not in ("", "/") or unknown:
            what = f"option {sorted(unknown)[0]!r}" if unknown else f"path {parts.path!r}"
            raise UsageError(f"{url}: unknown {what}: write memory://h1:7070,h2:7070?replicas=2&connections=4")
        if options.get("tls") == "":
            raise UsageError(f"{url}: tls= is empty: write tls=FILE, with the nodes' certificate in PEM form")
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
            tls=client_tls(options.get("tls")),
        )

    @property
    def url(self) -> str:
        return f"memory://{','.join(self.nodes)}" + (f"?replicas={self.replicas}" if self.replicas > 1 else "")

    @property
    def parallel_reads(self) -> int:
        return len(self.nodes) * self.connections

    def memory_nodes(self) -> MemoryStore:
        return self

    # --- connections --------------------------------------------------------------------------------------------

    def connect(self, node: str, run: str | None, *, write: bool = False) -> Connection:
        """Make a connection, opened for a run. A node that hangs and can be spared fails at once."""
        spare = self.health.can_spare(node)
        if spare:
            self.health.check(node)
        began = time.monotonic()
        try:
            connection = Connection.connect(
                node,
                token=self._token,
                tls=self._tls,
                connect_s=GREET_S if spare else CONNECT_S,
                pace_bytes_per_s=self._pace,
                stalled=self.health.stalled,
            )
        except StoreUnavailable as error:
            if time.monotonic() - began > SLOW_S:
                self.health.suspect(node, error)
            raise
        self.health.answers(node)
        try:
            if run is not None:
                connection.open(check_run(run), key=self._key, session=self.session, write=write)
        except BaseException:
            connection.close()
            raise
        return connection

    def _greet(self, node: str) -> None:
        Connection.connect(node, token=self._token, tls=self._tls, connect_s=GREET_S, progress_s=GREET_S).close()

    def call(
        self,
        node: str,
        run: str | None,
        kind: Kind,
        meta: dict[str, object] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> tuple[dict[str, object], bytearray]:
        return self._ask(node, run, lambda connection: connection.call(kind, meta, timeout_s=timeout_s))

    def _ask(self, node: str, run: str | None, question: Callable[[Connection], T]) -> T:
        """Call ``question`` with a connection, and keep it for the next time. An idle connection may have died
        unnoticed, so a failure on it is retried on another. A failed one is closed: part of an answer may be left."""
        while True:
            connection, was_idle = self._take(node, run)
            try:
                answer = question(connection)
            except StoreError as error:
                if not connection.broken:  # it only refused
                    self._give_back(node, run, connection)
                    raise
                connection.close()
                if not was_idle or not isinstance(error, StoreUnavailable):
                    raise
                continue
            except BaseException:
                connection.close()
                raise
            self._give_back(node, run, connection)
            return answer

    def _take(self, node: str, run: str | None) -> tuple[Connection, bool]:
        """Return a connection, and True if it was idle."""
        self.health.check(node)
        with self._lock:
            if idle := self._idle.get((node, run or "")):
                return idle.pop(), True
        return self.connect(node, run), False

    def _give_back(self, node: str, run: str | None, connection: Connection) -> None:
        with self._lock:
            self._idle.setdefault((node, run or ""), []).append(connection)

    def close(self) -> None:
        self.health.close()
        with self._lock:
            for connections in self._idle.values():
                for connection in connections:
                    connection.close()
            self._idle.clear()

    # --- the contract -------------------------------------------------------------------------------------------

    def call_each(
        self, run: str | None, kind: Kind, meta: dict[str, object] | None = None
    ) -> tuple[dict[str, tuple[dict[str, object], bytearray]], StoreError | None]:
        """Return the answers of the nodes that have one, and why another has none; raise that if all have none."""
        answers: dict[str, tuple[dict[str, object], bytearray]] = {}
        failure: StoreError | None = None
        for node in self.nodes:
            try:
                answers[node] = self.call(node, run, kind, meta)
            except StoreError as error:
                failure = error if failure is None or isinstance(failure, NotFound) else failure
        if not answers and failure is not None:
            raise failure
        return answers, failure

    def runs(self) -> list[str]:
        answers, _ = self.call_each(None, Kind.RUNS)
        return sorted({run for node, (answer, _) in answers.items() for run in run_names(answer, node)})

    def steps(self, run: str) -> list[int]:
        """Return the steps whose manifest some node has, damaged ones too, and whose every chunk some reachable node
        should have. If none is found and a node does not answer, raise: that node may have them."""
        return RunListing(self, run).whole_steps()

    def share_of(self, node: str) -> Share:
        """Return which chunks a node keeps of a checkpoint that is saved here."""
        return Share(nodes=len(self.nodes), index=self.nodes.index(node), replicas=self.replicas)

    def uncommitted_steps(self, run: str) -> dict[int, list[str]]:
        """Return the steps that were being committed when their trainer ended, and the nodes that have them; none if a
        node does not answer, since it may have the rest."""
        return RunListing(self, run).uncommitted_steps()

    def watch(self, run: str) -> RunWatch:
        return RunWatch(self, run)

    def is_durable(self, states: Mapping[str, str]) -> bool:
        """True if, by a checkpoint's states at the nodes, every chunk is on a disk or in object storage."""
        held = list(states.values())
        return "durable" in held or held.count("spilled") >= minimum_nodes(len(self.nodes), self.replicas)

    def manifest(self, run: str, step: int) -> Manifest:
        return self.newest_manifest(run, step)[0]

    def newest_manifest(self, run: str, step: int) -> tuple[Manifest, bytes]:
        """Return the newest manifest: of a step saved twice, a node that missed the second save has the first."""
        answers, failure = self.call_each(run, Kind.MANIFEST, {"step": step})
        found: list[tuple[Manifest, bytes]] = []
        for node, (_, body) in answers.items():
            try:
                found.append((read_manifest(bytes(body), run, step, f"memory node {node}"), bytes(body)))
            except Corrupt as error:
                failure = error
        if not found:
            raise failure or NotFound(f"{self.url} has no step {step} of run {run}")
        return max(found, key=lambda one: one[0].created_s)

    def read_chunk(self, manifest: Manifest, chunk: int, into: memoryview) -> None:
        """Read from the first node whose replica is good. Damaged replicas are replaced, with a warning."""
        check_length(manifest, chunk, into)
        nodes = self._addresses(manifest)
        replicas = [nodes[index] for index in replica_nodes(chunk, len(nodes), manifest.replicas)]
        others = [node for node in dict.fromkeys((*nodes, *self.nodes)) if node not in replicas]  # may have spilled it
        damaged: list[str] = []
        failure: StoreError | None = None
        for node in sorted([*replicas, *others], key=lambda node: (self.health.is_hung(node), node in others)):
            try:
                self._ask(node, manifest.run, lambda connection: connection.read_chunk(manifest, chunk, into))
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

    def _addresses(self, manifest: Manifest) -> Sequence[str]:
        """Return the present addresses of the nodes that share a checkpoint. One that was restarted may listen
        elsewhere: if this store lists as many nodes in the same order, it has the new address."""
        if len(manifest.nodes) != len(self.nodes):
            return manifest.nodes or self.nodes[:1]
        return [
            old if old in self.nodes or new in manifest.nodes else new
            for old, new in zip(manifest.nodes, self.nodes, strict=True)
        ]

    def _mend(self, node: str, manifest: Manifest, chunk: int, good: memoryview) -> None:
        meta = {"step": manifest.step, "chunk": chunk}
        what = f"chunk {chunk} of step {manifest.step} of run {manifest.run} at {node} was damaged"
        try:
            self._ask(node, manifest.run, lambda connection: connection.call(Kind.MEND, meta, bytes(good)))
            log.warning("%s and is replaced from a good replica", what)
        except StoreError as error:
            log.warning("%s and cannot be replaced: %s", what, error)

    def writer(self, run: str, step: int, *, size_bytes: int, chunk_bytes: int) -> MemoryWriter:
        return MemoryWriter(self, run, step, size_bytes=size_bytes, chunk_bytes=chunk_bytes).begin()

    def delete(self, run: str, step: int) -> None:
        """Delete on every node that answers; raise if one does not. A session that writes the run keeps it."""
        failure: StoreError | None = None
        for node in self.nodes:
            try:
                self.call(node, run, Kind.DELETE, {"step": step})
            except NotFound:
                pass
            except StoreError as error:
                failure = error
        if failure is not None:
            raise failure

    def extras(self, connection: Connection, step: int, world_size: int, timeout_s: float) -> list[object]:
        """Wait for every rank's own state, as the ranks sent it to their first node."""
        _, body = connection.call(
            Kind.EXTRAS, {"step": step, "world_size": world_size, "timeout_s": timeout_s}, timeout_s=timeout_s
        )
        return rank_states(bytes(body), world_size, connection.address)

    def status(self, node: str) -> dict[str, object]:
        return self.call(node, None, Kind.STATUS)[0]


def _options(query: str) -> dict[str, str]:
    """Parse a query. Unlike parse_qs: a plus sign is itself, as in a path, and an empty value is kept."""
    pairs = (part.partition("=") for part in query.split("&") if part)
    return {unquote(name): unquote(value) for name, _, value in pairs}
