"""What any way from the memory of one process into that of another can reach here: bytes sent, received, hashed.

No layout, no commit, nothing else at either end. iperf3 sends one buffer of 1 MiB again and again, which never leaves
the caches, and looks at nothing; a checkpoint is read from memory, written to memory, and hashed at both ends.
"""

from __future__ import annotations

import mmap
import multiprocessing
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import xxhash

from benchmarks.common import limits
from deepvm.protocol.sockets import HASHED_BYTES, tune

CONNECTIONS = 2
CHUNK_BYTES = 4 * 2**20  # what is hashed to one digest


class PlainTransfer:
    """Another process with memory of its own, and connections to it."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory[: len(memory) // CHUNK_BYTES * CHUNK_BYTES]
        context = multiprocessing.get_context("spawn")
        self._told, theirs = context.Pipe()
        self._process = context.Process(target=_receive, args=(theirs, len(self._memory)), daemon=True)
        self._process.start()
        port = self._told.recv()
        self._sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(CONNECTIONS)]
        for sock in self._sockets:
            tune(sock)

    def bytes_per_s(self, *, hashed: bool) -> float:
        """Into memory that is there already, hashed at both ends or not at all: what a save does."""
        return self._move(sender_hashes=hashed, receiver_hashes=hashed, fresh=False)

    def into_fresh_memory_bytes_per_s(self) -> float:
        """Into memory that was not there before, hashed where it arrives: what an eager restore does."""
        return self._move(sender_hashes=False, receiver_hashes=True, fresh=True)

    def _move(self, *, sender_hashes: bool, receiver_hashes: bool, fresh: bool) -> float:
        start = time.perf_counter()
        self._told.send((receiver_hashes, fresh))
        _together(lambda first: _each(self._memory, first, self._sockets[first].sendall, sender_hashes))
        assert self._told.recv() == "done"
        return len(self._memory) / (time.perf_counter() - start)

    def close(self) -> None:
        self._told.send(None)
        for sock in self._sockets:
            sock.close()
        self._process.join(10)


def _receive(told: Connection, size_bytes: int) -> None:
    memory = limits.warm_memory(size_bytes)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        told.send(listener.getsockname()[1])
        sockets = [listener.accept()[0] for _ in range(CONNECTIONS)]

    def take(memory: memoryview, hashed: bool) -> None:
        def receive(first: int) -> Callable[[memoryview], int]:
            return lambda piece: sockets[first].recv_into(piece, 0, socket.MSG_WAITALL)

        _together(lambda first: _each(memory, first, receive(first), hashed))

    while (asked := told.recv()) is not None:
        hashed, fresh = asked
        into = _fresh_memory(size_bytes) if fresh else memory
        take(into, hashed)
        told.send("done")
        del into  # giving it back is no part of it


def _fresh_memory(size_bytes: int) -> memoryview:
    found = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    found.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(found)


def _together(work: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=work, args=(i,)) for i in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _each(memory: memoryview, first: int, move: Callable[[memoryview], object], hashed: bool) -> None:
    """Move every second chunk, in pieces, and hash it."""
    for chunk in range(first * CHUNK_BYTES, len(memory), CONNECTIONS * CHUNK_BYTES):
        digest = xxhash.xxh3_64()
        for start in range(chunk, chunk + CHUNK_BYTES, HASHED_BYTES):
            piece = memory[start : start + HASHED_BYTES]
            move(piece)
            if hashed:
                digest.update(piece)
        digest.intdigest()
