"""What the machine allows, measured in the same run as what is compared with it."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path

MIB = 2**20
DEADLINE_S = 60


def warm_memory(size_bytes: int) -> memoryview:
    """Anonymous memory of which every page has been touched."""
    memory = mmap.mmap(-1, max(1, size_bytes))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    for offset in range(0, size_bytes, mmap.PAGESIZE):
        view[offset] = 1
    return view[:size_bytes]


def wake_memory(size_bytes: int) -> None:
    """Have so much of the machine's free memory be there when it is taken next.

    The hypervisor of a small test machine takes free memory back within seconds, and then gives it again at 0.4 GB/s,
    which is measured instead of whatever takes it. A rented machine has its memory from the start."""
    from deepvm.checkpoint.buffers.staging import Staging  # not above: it brings torch

    Staging(size_bytes)  # touched, and let go of


class AwakeMemory:
    """The same for what takes memory over a longer time than free memory stays awake, 1.5 s: while this is entered,
    some of the memory that it holds is let go of every moment, and is then the first that the kernel gives away."""

    SLABS, SLAB_BYTES, EVERY_S = 24, 400 * 10**6, 0.4  # for 9.6 s

    def __init__(self) -> None:
        self._slabs: list[object] = []
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        from deepvm.checkpoint.buffers.staging import Staging

        while len(self._slabs) < self.SLABS:
            self._slabs.append(Staging(self.SLAB_BYTES))
        self._over.clear()
        self._thread = threading.Thread(target=self._let_go, daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(DEADLINE_S)

    def _let_go(self) -> None:
        while self._slabs:
            self._slabs.pop()
            if self._over.wait(self.EVERY_S):
                return


class Memcpy:
    """One thread copies as many bytes as the state has, into memory that is there already."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self.source, self._target = warm_memory(size_bytes), warm_memory(size_bytes)
        self._addresses = [ctypes.addressof(ctypes.c_char.from_buffer(v)) for v in (self._target, self.source)]

    def seconds(self) -> float:
        start = time.perf_counter()
        ctypes.memmove(*self._addresses, self._size_bytes)
        return time.perf_counter() - start


def write_new_s(data: memoryview, path: Path) -> float:
    """A new file in pieces of 1 MiB, with fsync."""
    start = time.perf_counter()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        _write(descriptor, data)
    finally:
        os.close(descriptor)
    taken = time.perf_counter() - start
    path.unlink()
    return taken


def overwrite_s(data: memoryview, path: Path) -> float:
    """The same into a file that is there already; it stays."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        if os.fstat(descriptor).st_size != len(data):
            _write(descriptor, data)
            os.lseek(descriptor, 0, os.SEEK_SET)
        start = time.perf_counter()
        _write(descriptor, data)
        return time.perf_counter() - start
    finally:
        os.close(descriptor)


def _write(descriptor: int, data: memoryview) -> None:
    offset = 0
    while offset < len(data):
        offset += os.write(descriptor, data[offset : offset + MIB])
    os.fsync(descriptor)


class Iperf3:
    """``iperf3 -l 1M``, one stream on loopback: with its default blocks of 128 KiB it understates the limit."""

    def __init__(self) -> None:
        if shutil.which("iperf3") is None:
            raise RuntimeError("iperf3 is not installed: apt-get install iperf3")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = str(probe.getsockname()[1])
        self._server = subprocess.Popen(
            ["iperf3", "-s", "-B", "127.0.0.1", "-p", self._port], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", int(self._port)), timeout=1).close()
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def bytes_per_s(self, seconds: int = 1) -> float:
        for attempt in range(20):
            done = subprocess.run(
                ["iperf3", "-c", "127.0.0.1", "-p", self._port, "-l", "1M", "-t", str(seconds), "-J"],
                capture_output=True,
                timeout=DEADLINE_S,
                check=False,
            )
            report = json.loads(done.stdout or b"{}")
            if "end" in report and "sum_received" in report["end"]:
                return float(report["end"]["sum_received"]["bits_per_second"]) / 8
            time.sleep(0.05 * (attempt + 1))  # the server is busy closing the last test
        raise RuntimeError(f"iperf3 gave no result: {report.get('error')}")

    def close(self) -> None:
        self._server.terminate()
        self._server.wait(timeout=10)
