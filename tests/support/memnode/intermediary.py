"""Somebody between a client and a server, without the token: forwards bytes, or does harm."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from deepvm.protocol.frames import HEADER, decode_header
from deepvm.protocol.handshake import TAG_BYTES

Harm = Callable[[int, bytes], bytes]  # number of the frame from the client, the frame -> what is sent on


class Middle:
    """Listens on loopback. ``harm`` sees frames of a client of the node, header, meta and tag, without bodies."""

    def __init__(self, target: str = "", harm: Harm | None = None) -> None:
        self.target, self._harm = target, harm
        self.change_answers: Callable[[bytes], bytes] = lambda piece: piece
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Middle:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in self._sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                host, _, port = self.target.rpartition(":")
                server = socket.create_connection((host, int(port)), timeout=10)
                self._sockets += [client, server]
                forward = self._pump if self._harm is None else self._pump_frames
                threading.Thread(target=forward, args=(client, server), daemon=True).start()
                threading.Thread(target=self._pump, args=(server, client, True), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, answers: bool = False) -> None:
        with suppress(OSError):
            while piece := source.recv(65536):
                sink.sendall(self.change_answers(piece) if answers else piece)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)

    def _pump_frames(self, source: socket.socket, sink: socket.socket) -> None:
        assert self._harm is not None
        with suppress(OSError):
            number = 0
            while len(header := source.recv(HEADER.size, socket.MSG_WAITALL)) == HEADER.size:
                frame = decode_header(header)
                rest = frame.meta_bytes + (TAG_BYTES if number else 0)  # AUTH comes first, and has none
                head = header + (source.recv(rest, socket.MSG_WAITALL) if rest else b"")
                sink.sendall(self._harm(number, head))
                number += 1
                left = frame.body_bytes
                while left and (piece := source.recv(min(left, 65536))):
                    sink.sendall(piece)
                    left -= len(piece)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)
