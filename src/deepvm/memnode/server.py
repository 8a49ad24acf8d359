"""The memory node: listens, gives every client a thread, and stops within its deadlines."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from typing import Any

import deepvm
from deepvm.memnode.monitoring.counters import Counters
from deepvm.memnode.monitoring.log import Log
from deepvm.memnode.monitoring.metrics import MetricsServer
from deepvm.memnode.serving.admission import Admission, AdmittedPeer
from deepvm.memnode.serving.connection import ClientConnection
from deepvm.memnode.serving.socket_io import ClientSocket
from deepvm.memnode.settings import Settings
from deepvm.memnode.storage.arena import Arena
from deepvm.memnode.storage.budgets import Budget, KeptDocuments
from deepvm.memnode.storage.registry import Runs
from deepvm.memnode.writeback.writeback import Writeback
from deepvm.protocol import frames
from deepvm.protocol.addresses import join_address
from deepvm.protocol.auth import resolve_all
from deepvm.protocol.credentials import server_tls
from deepvm.protocol.sockets import accept_each, interrupt, listen_at

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
        self.admission = Admission(self.settings.limits)
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
        self._background: list[threading.Thread] = []
        self._listener: socket.socket | None = None
        self._address = ""
        self.advertised: frozenset[str] = frozenset()
        self._tls: ssl.SSLContext | None = None
        self._metrics: MetricsServer | None = None

    @property
    def address(self) -> str:
        return self._address

    @property
    def connections(self) -> int:
        """Clients that are connected, those who have not finished their handshake included."""
        return len(self.admission)

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
            self._listener = listen_at(self.settings.listen)
            self._address = join_address(*self._listener.getsockname()[:2])
            for work in (self._accept, self._tidy):
                thread = threading.Thread(target=work, name=f"deepvm-{work.__name__}", daemon=True)
                thread.start()
                self._background.append(thread)
            if self.settings.metrics is not None:
                self._metrics = MetricsServer(self.settings.metrics, self.status)
                self._metrics.start()
        except BaseException:
            self.stop(now=True)
            raise
        self.log.info(
            "listening",
            address=self._address,
            capacity_bytes=self.arena.capacity_bytes,
            block_bytes=self.settings.block_bytes,
            tls=self._tls is not None,
            token=self.settings.token is not None,
            metrics=None if self._metrics is None else self._metrics.address,
            spilled_checkpoints=loaded,
            version=deepvm.__version__,
        )

    def _accept(self) -> None:
        assert self._listener is not None  # noqa: S101 - start() made it
        accept_each(self._listener, self._admit, stopping=lambda: self.stopping, failed=self._accept_failed)

    def _accept_failed(self, error: Exception) -> None:
        self.log.warning("accept failed", error=str(error) or type(error).__name__)

    def _admit(self, sock: socket.socket, address: Any) -> None:
        name = join_address(*address[:2])
        place, dropped = self.admission.enter(sock, address[0])
        if dropped is not None:
            self.counters.add(connections_refused=1)
            self.log.warning("refused", client=dropped.host, reason="too many connections are shaking hands")
        thread = threading.Thread(target=self._serve, args=(place, name), name=f"deepvm-{name}", daemon=True)
        try:
            thread.start()
        except BaseException:
            self.admission.leave(place)
            raise

    def _serve(self, place: AdmittedPeer, name: str) -> None:
        self.counters.add(connections_total=1)
        try:
            self._serve_one(place, name)
        except Exception as error:  # out of memory, for one: this client loses its connection, the others nothing
            self.log.error("internal error", client=name, error=f"{type(error).__name__}: {error}")
        finally:
            place.sock.close()
            self.admission.leave(place)

    def _serve_one(self, place: AdmittedPeer, name: str) -> None:
        try:
            if self._tls is not None:
                place.sock.settimeout(self.settings.limits.handshake_s)
                place.sock = tls = self._tls.wrap_socket(place.sock, server_side=True, do_handshake_on_connect=False)
                tls.do_handshake()
            channel = ClientSocket(place.sock, frame_s=self.settings.limits.frame_s)
        except OSError as error:  # ssl's errors are among them
            self.log.warning("handshake failed", client=name, error=str(error))
            return
        connection = ClientConnection(self, channel, name, place)
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
        """Uploads that nobody touches any more give their memory back."""
        idle_s = self.settings.limits.upload_idle_s
        while not self.closing:
            for run in self.runs:
                run.drop_idle(idle_s)
            self._wake.wait(min(_TICK_S, idle_s / 4))

    # --- stop -----------------------------------------------------------------------------------------------------

    def stop(self, *, now: bool = False) -> None:
        """Uploads in progress may finish and what is committed is written on, within deadlines; ``now``: neither."""
        limits = self.settings.limits
        if self.closing:
            return
        self.stopping = True
        if self._listener is not None:
            interrupt(self._listener)  # or accept() would wait for its time-out
            self._listener.close()
        deadline = time.monotonic() + (0 if now else limits.stop_s)
        while time.monotonic() < deadline and self._under_way():
            time.sleep(0.02)
        self.closing = True
        self._wake.set()
        with self._lock:
            waiting = list(self._threads.items())
            for connection, _ in waiting:
                connection.interrupt()
        for thread in [thread for _, thread in waiting] + self._background:
            thread.join(5)
        if not self.writeback.flush(0 if now else limits.flush_s):
            self.log.warning("not everything was written on", **self.writeback.status())
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
            "address": self._address,
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
