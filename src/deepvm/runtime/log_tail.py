"""A log that grows -> its lines, as a terminal would show them: a progress bar, rewritten by ``\\r``, is one line."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from deepvm.runtime.line_buffer import LineBuffer

POLL_S = 0.02
MOST_BYTES = 2**20  # at once, and of one line
_DEEPVM_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} deepvm\.")
_TORCH_LINE = re.compile(r"(\[rank\d+\]:? ?)?\[?[WIEF]\d{4} \d\d:\d\d:\d\d")


def as_shown(line: str) -> str:
    """Return the part of a line that a terminal shows: the text after the last carriage return."""
    return next((part for part in reversed(line.split("\r")) if part), "")


def script_output(line: str) -> str:
    """Return the part of a line that the script printed, without the logs of deepvm and torch.

    They share one pipe. If deepvm logs in the middle of the script's line, its beginning is the script's."""
    if _TORCH_LINE.match(line):
        return ""
    own = _DEEPVM_LINE.search(line)
    return line if own is None else line[: own.start()]


def tail_text(path: Path, *, since: int = 0, most_bytes: int = 8_000) -> str:
    """Return the end of a file, from that offset on, as a terminal would show it."""
    try:
        with path.open("rb") as file:
            file.seek(max(since, file.seek(0, 2) - MOST_BYTES))
            found = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(as_shown(line) for line in found.split("\n"))[-most_bytes:]


class Tail:
    """Calls ``on_lines`` with whole lines, and ``on_update`` with a line that is still being rewritten, in a thread of
    its own. The file need not exist yet."""

    def __init__(
        self,
        path: Path,
        on_lines: Callable[[Sequence[str]], None],
        *,
        on_update: Callable[[str], None] = lambda _: None,
        from_end: bool = False,
    ) -> None:
        self._path, self._on_lines, self._on_update = path, on_lines, on_update
        self._offset = path.stat().st_size if from_end and path.exists() else 0
        self._lines = LineBuffer()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="deepvm-tail", daemon=True)

    def __enter__(self) -> Tail:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> Tail:
        self._thread.start()
        return self

    def drain(self) -> None:
        """Read the rest of the file now."""
        with self._lock:
            while self._read():
                pass

    def close(self) -> None:
        self._closed.set()
        self._thread.join(5.0)
        self.drain()

    def _follow(self) -> None:
        while not self._closed.wait(POLL_S):
            self.drain()

    def _read(self) -> bool:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                found = file.read(MOST_BYTES)
        except OSError:
            return False
        if not found:
            return False
        self._offset += len(found)
        if lines := self._lines.feed(found):
            self._on_lines([as_shown(line.decode(errors="replace")) for line in lines])
        # Of an incomplete line, keep what a terminal would show, at most MOST_BYTES.
        rest = self._lines.rest
        rewritten = rest.rfind(b"\r", 0, max(0, len(rest) - 1))
        self._lines.rest = rest = rest[max(0, rewritten) :][-MOST_BYTES:]
        if b"\r" in rest and (shown := as_shown(rest.decode(errors="replace"))):
            self._on_update(shown)
        return True
