"""Serve the node's status over HTTP: ``/metrics`` in Prometheus' text form, and ``/healthz``."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from deepvm.errors import DeepvmError
from deepvm.protocol.addresses import join_address, split_address
from deepvm.protocol.sockets import interrupt

_TIMEOUT_S = 5.0  # for a connection in all
_CONNECTIONS = 8

# status field -> name, kind, help; other fields are not metrics
_FIGURES: Mapping[str, tuple[str, str, str]] = {
    "uptime_s": ("uptime_seconds", "gauge", "Seconds since the node started."),
    "capacity_bytes": ("capacity_bytes", "gauge", "Memory for checkpoints."),
    "used_bytes": ("used_bytes", "gauge", "Memory that holds chunks."),
    "reserved_bytes": ("reserved_bytes", "gauge", "Memory reserved for uploads in progress."),
    "free_bytes": ("free_bytes", "gauge", "Memory that a new upload may take."),
    "touched_bytes": ("touched_bytes", "gauge", "Memory whose pages exist."),
    "runs": ("runs", "gauge", "Runs that are kept."),
    "checkpoints": ("checkpoints", "gauge", "Whole checkpoints that can be read."),
    "uploads": ("uploads", "gauge", "Checkpoints on their way in."),
    "documents_bytes": ("documents_bytes", "gauge", "Manifests and ranks' states that are kept."),
    "connections": ("connections", "gauge", "Clients connected."),
    "bytes_in": ("received_bytes_total", "counter", "Bytes received."),
    "bytes_out": ("sent_bytes_total", "counter", "Bytes sent."),
    "saves": ("saves_total", "counter", "Checkpoints published."),
    "aborts": ("aborts_total", "counter", "Uploads that ended unfinished."),
    "corrupt_chunks": ("corrupt_chunks_total", "counter", "Chunks whose digest was wrong."),
    "failed_logins": ("failed_logins_total", "counter", "Wrong tokens and wrong run keys."),
    "offered_chunks": ("offered_chunks_total", "counter", "Chunks that clients offered by content."),
    "linked_chunks": ("linked_chunks_total", "counter", "Chunks that were shared by content instead of sent."),
    "false_proofs": ("false_proofs_total", "counter", "Chunks that a client claimed to have and could not prove."),
    "malformed_frames": (
        "malformed_frames_total",
        "counter",
        "Connections closed for bytes that are not a valid frame.",
    ),
    "connections_total": ("connections_total", "counter", "Clients that ever connected."),
    "connections_refused": ("connections_refused_total", "counter", "Clients above the limit."),
    "spill_waiting": ("spill_waiting", "gauge", "Checkpoints to be written to the spill directory."),
    "spill_written": ("spill_written_total", "counter", "Checkpoints written to the spill directory."),
    "spill_skipped": ("spill_skipped_total", "counter", "Checkpoints superseded before they were spilled."),
    "spill_failures": ("spill_failures_total", "counter", "Attempts to spill that failed."),
    "durable_waiting": ("durable_waiting", "gauge", "Checkpoints to be written to the durable store."),
    "durable_written": ("durable_written_total", "counter", "Checkpoints written to the durable store."),
    "durable_skipped": ("durable_skipped_total", "counter", "Checkpoints superseded before they were durable."),
    "durable_failures": ("durable_failures_total", "counter", "Attempts to write durably that failed."),
}


def prometheus(status: Mapping[str, Any]) -> str:
    lines = []
    for field, (name, kind, meaning) in _FIGURES.items():
        if field in status:
            lines += [f"# HELP deepvm_memory_node_{name} {meaning}", f"# TYPE deepvm_memory_node_{name} {kind}"]
            lines.append(f"deepvm_memory_node_{name} {status[field]}")
    return "\n".join(lines) + "\n"


class MetricsServer:
    def __init__(self, listen: str, status: Callable[[], Mapping[str, Any]]) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = _TIMEOUT_S

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path == "/metrics":
                    self._answer(200, prometheus(status()), "text/plain; version=0.0.4; charset=utf-8")
                elif path == "/healthz":
                    stopping = status()["stopping"]
                    self._answer(503 if stopping else 200, "stopping\n" if stopping else "ok\n", "text/plain")
                else:
                    self._answer(404, "use /metrics or /healthz\n", "text/plain")

            def _answer(self, code: int, text: str, kind: str) -> None:
                body = text.encode()
                self.send_response(code)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass  # the node has its own log

        try:
            self._server = _Server(split_address(listen, listen=True), Handler)
        except OSError as error:
            raise DeepvmError(f"metrics cannot be served on {listen}: {error.strerror or error}") from None
        self.address = join_address(*self._server.server_address[:2])  # type: ignore[arg-type]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="deepvm-metrics", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join(5)
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    """Everybody who reaches the port may connect, so connections are few and short: clients of the node need the
    descriptors. If all places are taken, the oldest connection is dropped."""

    daemon_threads = True
    request_queue_size = 16

    def __init__(self, *given: Any) -> None:
        self._began_s: dict[socket.socket, float] = {}  # the oldest first
        self._dropped: set[socket.socket] = set()  # their threads have not ended yet
        self._places = threading.Lock()
        super().__init__(*given)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._places:
            if len(self._began_s) >= _CONNECTIONS:
                self._drop(next(iter(self._began_s)))
            full = len(self._dropped) >= _CONNECTIONS
            if not full:
                self._began_s[request] = time.monotonic()
        if full:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Drop connections whose time is up. Called several times a second."""
        with self._places:
            now_s = time.monotonic()
            for request in [one for one, began_s in self._began_s.items() if now_s - began_s > _TIMEOUT_S]:
                self._drop(request)

    def _drop(self, request: socket.socket) -> None:
        del self._began_s[request]
        self._dropped.add(request)
        interrupt(request)  # its thread closes it

    def shutdown_request(self, request: Any) -> None:
        try:
            super().shutdown_request(request)
        finally:
            with self._places:
                self._began_s.pop(request, None)
                self._dropped.discard(request)

    def handle_error(self, *_: object) -> None:
        pass  # a client that left in the middle
