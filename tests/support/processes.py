"""What the kernel knows about processes."""

from __future__ import annotations

from pathlib import Path


def gone(pid: int) -> bool:
    """True if the process has ended, reaped or not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"
