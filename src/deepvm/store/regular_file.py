"""Open files in folders that others may write to: a path in, a regular file of limited length out, or Corrupt.

A FIFO, a device or a socket may be there instead. Opening a FIFO waits for its other end, and a device may have no end.
"""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

from deepvm.errors import Corrupt

LEASE_S = 10.0  # a file server on this machine gives a file back in a moment, unless it hangs


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file, or one that a link leads to; return its descriptor. Corrupt if it is anything else."""
    deadline = time.monotonic() + LEASE_S
    while True:
        try:
            fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
            break
        except BlockingIOError:  # another process has a lease on it, and was just asked to give it back
            if time.monotonic() > deadline:
                raise
            time.sleep(0.005)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise Corrupt(f"{path} is not a regular file: remove it, or use another step")
    return fd


def read_regular(path: Path, most_bytes: int) -> bytes:
    """Read a regular file. Corrupt if it is something else, or longer."""
    with open(open_regular(path), "rb", buffering=0) as file:
        if (size := os.fstat(file.fileno()).st_size) > most_bytes:
            raise Corrupt(f"{path} has {size} bytes, at most {most_bytes} are allowed: it is not deepvm's")
        data = bytearray()
        while len(data) <= most_bytes and (piece := file.read(min(most_bytes + 1 - len(data), 2**20))):
            data += piece
    if len(data) > most_bytes:  # it grew meanwhile
        raise Corrupt(f"{path} has more than {most_bytes} bytes: it is not deepvm's")
    return bytes(data)


def write_private(path: Path, text: str) -> None:
    """Replace a file by a new one that only its owner can read, whatever the umask is."""
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(fd, "w", encoding="utf-8", newline="") as file:
        file.write(text)
