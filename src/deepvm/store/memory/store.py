"""Memory nodes as a store: ``memory://h1:7070,h2:7070?replicas=2``.

Losing a node loses nothing as long as every chunk has a replica left.
"""

from __future__ import annotations

import logging
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from deepvm.errors import Corrupt, NotFound, StoreError, StoreUnavailable, UsageError
from deepvm.protocol.addresses import split_address
from deepvm.protocol.credentials import client_tls
from deepvm.protocol.frames import Kind
from deepvm.protocol.placement import minimum_nodes, replica_nodes
from deepvm.store.base import Manifest, Store, check_run
from deepvm.store.chunks import check_length, read_manifest
from deepvm.store.memory.answers import rank_states, run_names, step_rows
from deepvm.store.memory.connection import CONNECT_S, Connection
from deepvm.store.memory.health import GREET_S, Health
from deepvm.store.memory.upload import MemoryWriter

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
            raise UsageError(f"{replicas} replicas cannot be kept on {len(nodes)} memory node(s)")
        if not 1 <= connections <= 64:
            raise UsageError(f"{connections} connections to a memory node: it takes 1 to 64")
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
            raise UsageError(f"{url}: {what} is not known; write memory://h1:7070,h2:7070?replicas=2&connections=4")
        if options.get("tls") == "":
            raise UsageError(f"{url}: tls= names no file; write tls=FILE, with the nodes' certificate in PEM form")
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
        """A connection of its own, opened for a run. A node that hangs and can be spared is passed over at once."""
        spare = self.health.can_spare(node)
        if spare:
            self.health.check(node)
        began = time.monotonic()
        try:
            connection = Connection(
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
        Connection(node, token=self._token, tls=self._tls, connect_s=GREET_S, progress_s=GREET_S).close()

    def call(
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
        self.health.check(node)
        with self._lock:
            idle = self._idle.get((node, run or ""))
            if idle:
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

    def _each(
        self, run: str | None, kind: Kind, meta: dict[str, object] | None = None
    ) -> tuple[dict[str, tuple[dict[str, object], bytearray]], StoreError | None]:
        """The answers of the nodes that have one, and why another has none; that is raised where all have none."""
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
        answers, _ = self._each(None, Kind.RUNS)
        return sorted({run for node, (answer, _) in answers.items() for run in run_names(answer, node)})

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

    def uncommitted_steps(self, run: str) -> dict[int, list[str]]:
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
                document = self.call(node, run, Kind.MANIFEST, {"step": step})[1]
                manifest = read_manifest(bytes(document), run, step, f"memory node {node}")
                return len(holders) >= minimum_nodes(len(manifest.nodes), manifest.replicas)
        return False

    def _held(self, run: str) -> tuple[dict[int, list[str]], StoreError | None]:
        answers, failure = self._each(run, Kind.STEPS)
        held: dict[int, list[str]] = {}
        for node, (answer, _) in answers.items():
            for row in step_rows(answer, node):
                held.setdefault(row["step"], []).append(node)
        return held, failure

    def states(self, run: str, step: int) -> list[str]:
        """What each reachable node says of a checkpoint: remote, spilled or durable."""
        answers, _ = self._each(run, Kind.STEPS)
        rows = (row for node, (answer, _) in answers.items() for row in step_rows(answer, node))
        return [row["state"] for row in rows if row["step"] == step]

    def writes_on(self, run: str) -> bool:
        """Whether the nodes write what is committed on to a disk or a durable store by themselves."""
        answers, _ = self._each(run, Kind.STEPS)
        return any(answer.get("writes_on") for answer, _ in answers.values())

    def is_durable(self, states: Sequence[str]) -> bool:
        """Whether, of a checkpoint that the nodes speak of so, every chunk is on a disk or in object storage."""
        return "durable" in states or states.count("spilled") >= minimum_nodes(len(self.nodes), self.replicas)

    def manifest(self, run: str, step: int) -> Manifest:
        return self.newest_manifest(run, step)[0]

    def newest_manifest(self, run: str, step: int) -> tuple[Manifest, bytes]:
        """Of a step that was saved twice, a node that was away the second time has the first."""
        answers, failure = self._each(run, Kind.MANIFEST, {"step": step})
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
        """From the first node that has it as it was saved. A copy that is not is replaced, and said so."""
        check_length(manifest, chunk, into)
        nodes = self._addresses(manifest)
        homes = [nodes[home] for home in replica_nodes(chunk, len(nodes), manifest.replicas)]
        others = [node for node in dict.fromkeys((*nodes, *self.nodes)) if node not in homes]  # may have spilled it all
        damaged: list[str] = []
        failure: StoreError | None = None
        for node in sorted([*homes, *others], key=lambda node: (self.health.is_hung(node), node in others)):
            try:
                self._ask(node, manifest.run, _getting(manifest, chunk, into))
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
        """Where the nodes that share a checkpoint are now. One that was started again may listen elsewhere: then this
        store, which names as many nodes in the same order, knows its new address."""
        if len(manifest.nodes) != len(self.nodes):
            return manifest.nodes or self.nodes[:1]
        return [
            was if was in self.nodes or now in manifest.nodes else now
            for was, now in zip(manifest.nodes, self.nodes, strict=True)
        ]

    def _mend(self, node: str, manifest: Manifest, chunk: int, good: memoryview) -> None:
        meta = {"step": manifest.step, "chunk": chunk}
        what = f"chunk {chunk} of step {manifest.step} of run {manifest.run} at {node} was damaged"
        try:
            self._ask(node, manifest.run, lambda connection: connection.call(Kind.MEND, meta, bytes(good)))
            log.warning("%s, and is replaced from a good copy", what)
        except StoreError as error:
            log.warning("%s, and cannot be replaced: %s", what, error)

    def writer(self, run: str, step: int, *, size_bytes: int, chunk_bytes: int) -> MemoryWriter:
        return MemoryWriter(self, run, step, size_bytes=size_bytes, chunk_bytes=chunk_bytes)

    def delete(self, run: str, step: int) -> None:
        """On every node that answers; raises for one that does not. Takes the run from nobody who writes it."""
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
        """Every rank's own state, as the ranks sent it to their first node."""
        _, body = connection.call(
            Kind.EXTRAS, {"step": step, "world_size": world_size, "timeout_s": timeout_s}, timeout_s=timeout_s
        )
        return rank_states(bytes(body), world_size, connection.address)

    def status(self, node: str) -> dict[str, object]:
        return self.call(node, None, Kind.STATUS)[0]


def _options(query: str) -> dict[str, str]:
    """A plus sign is itself, as in the path of a file; what is not said is not lost: ``tls=`` is not no TLS."""
    pairs = (part.partition("=") for part in query.split("&") if part)
    return {unquote(name): unquote(value) for name, _, value in pairs}


def _getting(manifest: Manifest, chunk: int, into: memoryview) -> Callable[[Connection], None]:
    meta, digest = {"step": manifest.step, "chunk": chunk}, manifest.digests[chunk]
    return lambda connection: connection.read_into(Kind.GET, meta, into, digest)
