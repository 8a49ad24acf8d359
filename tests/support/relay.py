"""A way to a memory node on which bytes can be held up: a plain TCP relay."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from typing import Any


class Relay:
    """Forwards every connection to the node. Connections that are made while ``hold_after`` is set get so many bytes
    each, and the rest once ``release`` is called. ``pause_s`` is slept after every piece from the node."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.hold_after: int | None = None
        self.pause_s = 0.0
        self._released = threading.Event()
        self._sockets: list[socket.socket] = []
        self._closed = False
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def release(self) -> None:
        self._released.set()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                node = socket.create_connection(self._target, timeout=10)
                node.settimeout(None)
                self._sockets += [client, node]
                if self._closed:
                    client.close()
                    node.close()
                    return
                for source, sink, most in ((client, node, None), (node, client, self.hold_after)):
                    threading.Thread(target=self._forward, args=(source, sink, most), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, most: int | None) -> None:
        passed = 0
        with suppress(OSError):
            while data := source.recv(2**16):
                passed += len(data)
                if most is not None and passed > most:
                    self._released.wait(60)
                sink.sendall(data)
                if sink.getpeername()[1] != self._target[1]:
                    time.sleep(self.pause_s)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        self._released.set()
        self._closed = True
        for end in (self._listener, *self._sockets):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._accepting.join(10)

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
