"""A notice in a file: for local machines, and for any cloud that can run a command."""

from __future__ import annotations

import json
import time
from pathlib import Path

from deepvm import strict_json
from deepvm.errors import UsageError
from deepvm.runtime.notices.base import Notice
from deepvm.store.regular_file import write_private

_MOST_BYTES = 2**16


class FileNotices:
    """``{"action": "terminate", "at_s": 1790000000.0}``; an empty file is a notice without a time."""

    interval_s = 0.1

    def __init__(self, path: Path) -> None:
        self._path = path

    def poll(self) -> Notice | None:
        try:
            with open(self._path, "rb") as file:
                found = strict_json.loads(file.read(_MOST_BYTES + 1) or b"{}", most_bytes=_MOST_BYTES)
            at_s = found.get("at_s")
            return Notice(
                action=found.get("action", "terminate"),
                at_s=None if at_s is None else float(at_s),
                source=f"file {self._path}",
            )
        except (OSError, ValueError, TypeError, AttributeError, OverflowError, UsageError):
            return None  # missing, incomplete or invalid


def write_notice(path: Path, *, seconds_left: float | None, action: str = "terminate") -> None:
    """Write a notice atomically."""
    at_s = None if seconds_left is None else time.time() + seconds_left
    new = path.with_name(path.name + ".tmp")
    write_private(new, json.dumps({"action": action, "at_s": at_s}))
    new.replace(path)
