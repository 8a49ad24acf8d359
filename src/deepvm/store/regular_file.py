"""Files in folders that strangers may write to: a FIFO, a device or a socket may stand where a file is looked for.

Opening a FIFO waits for somebody at its other end, and a device may have no end. So nothing is opened that waits,
nothing is read but regular files, and no more than is wanted.
"""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

from deepvm.errors import Corrupt

LEASE_S = 10.0  # a file server on this machine gives a file back in a moment; a holder that hangs is told


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file, or of one that a link leads to. Corrupt if it is anything else."""
    deadline = time.monotonic() + LEASE_S
    while True:
        try:
            fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
            break
        except BlockingIOError:  # somebody has a lease on it, and was just asked to give it back
            if time.monotonic() > deadline:
                raise
            time.sleep(0.005)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise Corrupt(f"{path} is not a regular file, and is not read: remove it, or use another step")
    return fd


def read_regular(path: Path, most_bytes: int) -> bytes:
    """All bytes of a regular file. Corrupt if it is something else, or longer."""
    with open(open_regular(path), "rb", buffering=0) as file:
        if (size := os.fstat(file.fileno()).st_size) > most_bytes:
            raise Corrupt(f"{path} has {size} bytes, more than {most_bytes} bytes are not read: it is not deepvm's")
        data = bytearray()
        while len(data) <= most_bytes and (piece := file.read(min(most_bytes + 1 - len(data), 2**20))):
            data += piece
    if len(data) > most_bytes:  # it grew meanwhile
        raise Corrupt(f"{path} has more than {most_bytes} bytes: it is not deepvm's")
    return bytes(data)


def write_private(path: Path, text: str) -> None:
    """A new file in the place of what was there, for its owner only, whatever the umask is."""
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(fd, "w", encoding="utf-8", newline="") as file:
        file.write(text)
