"""A file that others append lines to, read as it grows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

LOOK_S = 0.02
MOST_BYTES = 2**20  # at once


def last_words(path: Path, *, since: int = 0, most_bytes: int = 8_000) -> str:
    """The end of a file, from that offset on."""
    try:
        with path.open("rb") as file:
            file.seek(max(since, file.seek(0, 2) - most_bytes))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


class Tail:
    """``on_line`` is called for each whole line, in a thread of its own; the file may not be there yet."""

    def __init__(self, path: Path, on_line: Callable[[str], None], *, from_end: bool = False) -> None:
        self._path, self._on_line = path, on_line
        self._offset = path.stat().st_size if from_end and path.exists() else 0
        self._rest = b""
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="deepvm-tail", daemon=True)
        self._thread.start()

    def drain(self) -> None:
        """All that is there now."""
        with self._lock:
            while self._read():
                pass

    def close(self) -> None:
        self._closed.set()
        self._thread.join(5.0)
        self.drain()

    def _follow(self) -> None:
        while not self._closed.wait(LOOK_S):
            self.drain()

    def _read(self) -> bool:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                found = file.read(MOST_BYTES)
        except OSError:
            return False
        self._offset += len(found)
        *lines, self._rest = (self._rest + found).split(b"\n")
        for line in lines:
            self._on_line(line.decode(errors="replace"))
        return bool(found)
