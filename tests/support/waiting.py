"""One way to wait for something that happens elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 60.0


def wait_until(
    ready: Callable[[], Any], what: str = "it", *, timeout_s: float = PATIENCE_S, every_s: float = 0.005
) -> Any:
    """Return the first true value of ``ready``; fail with ``what`` if there is none in time."""
    deadline = time.monotonic() + timeout_s
    while not (found := ready()):
        assert time.monotonic() < deadline, f"{what} did not happen in {timeout_s:g} s"
        time.sleep(every_s)
    return found
