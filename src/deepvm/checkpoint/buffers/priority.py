"""Threads beside training: they use the cores that the trainer leaves."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

NICENESS = 10


def lower_priority() -> None:
    """Make this thread's work less urgent than training."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def start_background(name: str, work: Callable[..., object], *arguments: Any) -> threading.Thread:
    """Start a thread of low priority."""

    def run() -> None:
        lower_priority()
        work(*arguments)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
