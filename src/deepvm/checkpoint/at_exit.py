"""A normal end of the interpreter finishes the saves that are under way, also where a script never calls close().

It runs before Python waits for its threads: later, none can be started any more. ``os._exit`` and signals that end a
process finish nothing.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import weakref
from concurrent.futures import thread as _pools  # noqa: F401 - its own handler comes first, so that it runs after ours
from contextlib import suppress
from typing import Protocol

log = logging.getLogger("deepvm.checkpoint")


class Finishing(Protocol):
    def finish_at_exit(self, *, failed: str) -> None:
        """``failed``: the exception that ends the process, if one does."""
        ...


_open: weakref.WeakSet[Finishing] = weakref.WeakSet()
_pid: int | None = None  # of the process whose end is expected: a fork inherits handlers that are not its own


def expect(checkpointer: Finishing) -> None:
    """Finish this one, unless it is closed before."""
    global _open, _pid
    if _pid != os.getpid():
        _open, _pid = weakref.WeakSet(), os.getpid()
        register = getattr(threading, "_register_atexit", atexit.register)
        with suppress(RuntimeError):  # the end has begun already
            register(_finish_all)
    _open.add(checkpointer)


def forget(checkpointer: Finishing) -> None:
    _open.discard(checkpointer)


def _finish_all() -> None:
    if _pid != os.getpid():
        return
    raised = getattr(sys, "last_value", None)  # what the interpreter has just printed
    failed = "" if raised is None else type(raised).__name__
    for checkpointer in list(_open):
        try:
            checkpointer.finish_at_exit(failed=failed)
        except Exception:
            log.exception("a checkpointer could not be closed at the end of the process")
