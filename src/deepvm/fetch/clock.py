"""One clock for all processes of a machine, in seconds since boot."""

from __future__ import annotations

import os
import time

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # the clock of /proc, on Linux
_LOADED_S = time.clock_gettime(_CLOCK)


def now_s() -> float:
    return time.clock_gettime(_CLOCK)


def started_ticks(pid: int | str = "self") -> int:
    """Return when a process was started, in ticks since boot; 0 if /proc does not say. With its pid, a unique name."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # the program's name may hold anything
        return int(fields[19])
    except (OSError, IndexError, ValueError):
        return 0


def process_started_s() -> float:
    """Return when this process was started; if /proc does not say, when this module was loaded."""
    ticks = started_ticks()
    return ticks / os.sysconf("SC_CLK_TCK") if ticks else _LOADED_S
