"""Structured logs: events in, JSON lines out. Tokens, keys, proofs and verifiers are never logged."""

from __future__ import annotations

import json
import sys
import threading
from datetime import datetime, timezone
from typing import IO, Any


class Log:
    def __init__(self, stream: IO[str] | None) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    @classmethod
    def to_stderr(cls) -> Log:
        return cls(sys.stderr)

    def info(self, event: str, **details: Any) -> None:
        self._write("info", event, details)

    def warning(self, event: str, **details: Any) -> None:
        self._write("warning", event, details)

    def error(self, event: str, **details: Any) -> None:
        self._write("error", event, details)

    def _write(self, level: str, event: str, details: dict[str, Any]) -> None:
        if self._stream is None:
            return
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        line = json.dumps({"time": now, "level": level, "event": event, **details}, default=str)
        with self._lock:
            try:
                self._stream.write(line + "\n")
                self._stream.flush()
            except (OSError, ValueError):  # the reader of the log is gone; the node continues
                self._stream = None
