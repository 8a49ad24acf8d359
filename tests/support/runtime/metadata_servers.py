"""Metadata services on loopback that answer as the clouds' manuals say, and others that misbehave."""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, str]


class Cloud(ThreadingHTTPServer):
    """Answers from ``paths``; every request is kept in ``asked``."""

    flavor: str | None = None

    def __init__(self) -> None:
        self.paths: dict[str, str] = {}
        self.asked: list[str] = []
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def reply(self, method: str, path: str, header: Callable[[str], str | None]) -> Reply:
        raise NotImplementedError

    def at(self, path: str) -> Reply:
        return (200, self.paths[path]) if path in self.paths else (404, "<html>404 - Not Found</html>")


class _Handler(BaseHTTPRequestHandler):
    server: Cloud

    def _answer(self) -> None:
        self.server.asked.append(f"{self.command} {self.path}")
        status, text = self.server.reply(self.command, self.path, self.headers.get)
        body = text.encode("utf-8", "surrogateescape")
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if self.server.flavor is not None:
            self.send_header("Metadata-Flavor", self.server.flavor)
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_PUT = _answer

    def log_message(self, *_: object) -> None:
        pass


class Ec2(Cloud):
    ACTION = "/latest/meta-data/spot/instance-action"
    REBALANCE = "/latest/meta-data/events/recommendations/rebalance"

    def __init__(self) -> None:
        self.tokens: dict[str, float] = {}  # until when each holds
        self._numbers = itertools.count()
        super().__init__()

    def reply(self, method: str, path: str, header: Callable[[str], str | None]) -> Reply:
        if path == "/latest/api/token":
            ttl_s = header("X-aws-ec2-metadata-token-ttl-seconds")
            if method != "PUT":
                return 405, ""
            if ttl_s is None or not 1 <= int(ttl_s) <= 21_600:
                return 400, ""
            token = f"AQAE{next(self._numbers)}=="
            self.tokens[token] = time.monotonic() + int(ttl_s)
            return 200, token
        if self.tokens.get(header("X-aws-ec2-metadata-token") or "", 0) < time.monotonic():
            return 401, "<html>401 - Unauthorized</html>"
        return self.at(path)

    @property
    def tokens_given(self) -> int:
        return len(self.tokens)


class Gce(Cloud):
    flavor = "Google"
    PREEMPTED = "/computeMetadata/v1/instance/preempted"
    MAINTENANCE = "/computeMetadata/v1/instance/maintenance-event"

    def __init__(self) -> None:
        super().__init__()
        self.paths = {"/computeMetadata/v1/instance/id": "42", self.PREEMPTED: "FALSE", self.MAINTENANCE: "NONE"}

    def reply(self, method: str, path: str, header: Callable[[str], str | None]) -> Reply:
        if header("Metadata-Flavor") != "Google":
            return 403, "Missing Metadata-Flavor:Google header."
        return self.at(path) if method == "GET" else (405, "")


class AzureImds(Cloud):
    EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
    NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"

    def __init__(self) -> None:
        super().__init__()
        self.paths = {self.NAME: "worker_3"}
        self.announce()

    def reply(self, method: str, path: str, header: Callable[[str], str | None]) -> Reply:
        if header("Metadata") != "true":
            return 400, '{"error": "Bad request. Required metadata header not specified"}'
        return self.at(path) if method == "GET" else (405, "")

    def announce(self, *events: dict[str, Any]) -> None:
        self.paths[self.EVENTS] = json.dumps({"DocumentIncarnation": 1, "Events": list(events)})


def azure_event(kind: str, *, at_s: float | None, resources: tuple[str, ...] = ("worker_3",), **more: str) -> Any:
    return {
        "EventId": "602d9444-d2cd-49c7-8624-8643e7171297",
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": list(resources),
        "EventStatus": "Scheduled" if at_s is not None else "Started",
        "NotBefore": formatdate(at_s, usegmt=True) if at_s is not None else "",
        "Description": "Virtual machine is going to be evicted",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
        **more,
    }


@contextmanager
def running(cloud: Cloud) -> Iterator[Cloud]:
    thread = threading.Thread(target=cloud.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield cloud
    finally:
        cloud.shutdown()
        cloud.server_close()
        thread.join(10)


@contextmanager
def raw_server(says: bytes | None) -> Iterator[str]:
    """Says these bytes to whoever connects, whatever is asked; nothing at all, for ever, where there are none."""
    listener = socket.create_server(("127.0.0.1", 0))
    open_ones: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            if says is None:
                open_ones.append(connection)
                continue
            with connection:
                connection.recv(65536)
                connection.sendall(says)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)
        for connection in open_ones:
            connection.close()
