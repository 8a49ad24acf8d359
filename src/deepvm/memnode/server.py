"""Run a memory node: settings in, a listening server out. Each client has a thread (serving/connection.py)."""

from __future__ import annotations

import ssl
import threading
import time
from typing import Any

import deepvm
from deepvm.memnode.errors import RequestRefused
from deepvm.memnode.monitoring.counters import Counters
from deepvm.memnode.monitoring.log import Log
from deepvm.memnode.monitoring.metrics import MetricsServer
from deepvm.memnode.serving.connection import ClientConnection
from deepvm.memnode.serving.socket_io import ClientSocket
from deepvm.memnode.settings import Settings
from deepvm.memnode.storage.arena import Arena
from deepvm.memnode.storage.budgets import Budget, KeptDocuments
from deepvm.memnode.storage.registry import Runs
from deepvm.memnode.writeback.writeback import Writeback
from deepvm.protocol import frames
from deepvm.protocol.acceptor import Acceptor, Peer
from deepvm.protocol.credentials import server_tls
from deepvm.protocol.handshake import resolve_all

_TICK_S = 0.5
_TOUCHED_FIRST_BYTES = 512 * 2**20  # so that a first save of this size finds warm memory; the rest follows demand


class MemoryNode:
    """``with MemoryNode(capacity_bytes=2**30) as node: ... node.address``. Settings' fields are the arguments."""

    def __init__(self, settings: Settings | None = None, /, *, log: Log | None = None, **fields: Any) -> None:
        self.settings = settings if settings is not None else Settings(**fields)
        self.log = log or Log(None)
        self.counters = Counters()
        self.arena = Arena(self.settings.capacity_bytes, self.settings.block_bytes)
        self.arena.prefault(_TOUCHED_FIRST_BYTES // self.settings.block_bytes)
        self.documents = Budget(self.settings.incoming_documents_bytes)
        self.kept = KeptDocuments(self.settings.kept_documents_bytes)
        try:
            self.writeback = Writeback(self.settings, self.log)
        except BaseException:
            self.arena.close()
            raise
        self.runs = Runs(self.arena, self.writeback, self.counters, self.kept, most=self.settings.limits.runs)
        self.stopping = False  # no new connections and uploads
        self.closing = False  # no more frames
        self._started_s = time.time()
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._threads: dict[ClientConnection, threading.Thread] = {}
        self._tidying = threading.Thread(target=self._tidy, name="deepvm-tidy", daemon=True)
        self._acceptor: Acceptor | None = None
        self.advertised: frozenset[str] = frozenset()
        self._tls: ssl.SSLContext | None = None
        self._metrics: MetricsServer | None = None

    @property
    def address(self) -> str:
        """Where the node listens; empty before ``start``."""
        return "" if self._acceptor is None else self._acceptor.address

    @property
    def connections(self) -> int:
        """The number of connections, those included that have not finished their handshake."""
        return 0 if self._acceptor is None else len(self._acceptor)

    def __enter__(self) -> MemoryNode:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # --- start ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        try:
            self._tls = server_tls(self.settings.tls_cert, self.settings.tls_key)
            self.advertised = resolve_all(self.settings.advertise)
            self.arena.start()
            loaded = self.writeback.start(self.runs, self.arena)
            limits = self.settings.limits
            self._acceptor = Acceptor(
                self.settings.listen,
                self._serve,
                connections=limits.connections,
                connections_of_a_host=limits.connections_of_a_host,
                handshakes=limits.handshakes,
                silent_s=limits.silent_s,
                dropped=lambda peer, reason: self._refused(peer.host, reason),
                failed=lambda error: self.log.warning("accept failed", error=str(error) or type(error).__name__),
            )
            self._acceptor.start()
            self._tidying.start()
            if self.settings.metrics is not None:
                self._metrics = MetricsServer(self.settings.metrics, self.status)
                self._metrics.start()
        except BaseException:
            self.stop(now=True)
            raise
        self.log.info(
            "listening",
            address=self.address,
            capacity_bytes=self.arena.capacity_bytes,
            block_bytes=self.settings.block_bytes,
            tls=self._tls is not None,
            token=self.settings.token is not None,
            metrics=None if self._metrics is None else self._metrics.address,
            spilled_checkpoints=loaded,
            version=deepvm.__version__,
        )

    def admit(self, peer: Peer) -> None:
        """Give a client whose handshake is over its place, or refuse it."""
        reason = None if self._acceptor is None else self._acceptor.admit(peer)
        if reason is not None:
            self._refused(peer.name, reason)
            raise RequestRefused("busy", reason)

    def _refused(self, client: str, reason: str) -> None:
        self.counters.add(connections_refused=1)
        self.log.warning("refused", client=client, reason=reason)

    def _serve(self, peer: Peer) -> None:
        self.counters.add(connections_total=1)
        until = time.monotonic() + self.settings.limits.handshake_s  # for all of it, TLS included
        try:
            if self._tls is not None:
                peer.sock.settimeout(self.settings.limits.handshake_s)
                peer.sock = tls = self._tls.wrap_socket(peer.sock, server_side=True, do_handshake_on_connect=False)
                tls.do_handshake()
            channel = ClientSocket(peer.sock, frame_s=self.settings.limits.frame_s)
        except OSError as error:  # ssl's errors are among them
            self.log.warning("handshake failed", client=peer.name, error=str(error))
            return
        connection = ClientConnection(self, channel, peer, handshake_until=until)
        with self._lock:
            self._threads[connection] = threading.current_thread()
            if self.closing:
                connection.interrupt()
        try:
            connection.serve()
        finally:
            with self._lock:
                del self._threads[connection]

    def _tidy(self) -> None:
        """Free the memory of abandoned uploads."""
        idle_s = self.settings.limits.upload_idle_s
        while not self.closing:
            for run in self.runs:
                run.drop_idle(idle_s)
            self._wake.wait(min(_TICK_S, idle_s / 4))

    # --- stop -----------------------------------------------------------------------------------------------------

    def stop(self, *, now: bool = False) -> None:
        """Let uploads finish and write back what is committed, within deadlines; ``now``: neither."""
        limits = self.settings.limits
        if self.closing:
            return
        self.stopping = True
        if self._acceptor is not None:
            self._acceptor.stop()
        deadline = time.monotonic() + (0 if now else limits.stop_s)
        while time.monotonic() < deadline and self._under_way():
            time.sleep(0.02)
        self.closing = True
        self._wake.set()
        with self._lock:
            waiting = dict(self._threads)
        for connection in waiting:
            connection.interrupt()
        for thread in (*waiting.values(), self._tidying):
            if thread.ident is not None:
                thread.join(5)
        if not self.writeback.flush(0 if now else limits.flush_s):
            self.log.warning("not everything was written back", **self.writeback.status())
        self.writeback.close()
        if self._metrics is not None:
            self._metrics.close()
        self.arena.close()
        self.log.info("stopped", **self.counters.as_dict())

    def _under_way(self) -> bool:
        with self._lock:
            return any(connection.busy for connection in self._threads) or any(run.uploads for run in self.runs)

    # --- figures --------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        block = self.arena.block_bytes
        return {
            "version": deepvm.__version__,
            "protocol": frames.VERSION,
            "address": self.address,
            "uptime_s": round(time.time() - self._started_s, 3),
            "stopping": self.stopping,
            "capacity_bytes": self.arena.capacity_bytes,
            "block_bytes": block,
            "buffers": self.settings.buffers,
            "used_bytes": self.arena.used * block,
            "reserved_bytes": self.arena.reserved * block,
            "free_bytes": self.arena.free * block,
            "touched_bytes": self.arena.touched * block,
            "runs": len(self.runs),
            "checkpoints": sum(len(run.checkpoints) for run in self.runs),
            "uploads": sum(len(run.uploads) for run in self.runs),
            "documents_bytes": self.kept.used_bytes,
            "connections": self.connections,
            **self.counters.as_dict(),
            **self.writeback.status(),
        }
