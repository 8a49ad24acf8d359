"""Lines that a user has to see: on the terminal, also where logging was configured without us in mind."""

from __future__ import annotations

import logging
import sys

log = logging.getLogger("deepvm.checkpoint")


def alarm(text: str) -> None:
    """Log an error. Where a later configuration of logging has switched our logger off (``dictConfig`` does so), it
    goes to stderr instead; where logging is off as a whole, nobody wants to read it."""
    if log.isEnabledFor(logging.ERROR):
        log.error("%s", text)
    elif log.manager.disable < logging.ERROR:
        print(f"deepvm: {text}", file=sys.stderr, flush=True)
