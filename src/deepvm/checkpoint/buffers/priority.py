"""Work beside training: it takes what the trainer leaves of the cores."""

from __future__ import annotations

import os
import threading
from contextlib import suppress

NICENESS = 10


def lower_priority() -> None:
    """From here on this thread's work is less urgent than training."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
