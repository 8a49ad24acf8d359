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
from collections.abc import Sequence
from concurrent.futures import thread as _pools  # noqa: F401 - its own handler comes first, so that it runs after ours
from contextlib import suppress
from typing import Protocol

log = logging.getLogger("deepvm.checkpoint")

GIVE_WAY_S = 20.0  # how long a new Checkpointer waits for an older one of its run that was never closed


class Finishing(Protocol):
    @property
    def place(self) -> tuple[str, str]:
        """The run, and the store that it is saved into."""
        ...

    def give_way(self, stores: Sequence[object]) -> None:
        """Close: another one takes its place, with these stores."""
        ...

    def finish_at_exit(self, *, failed: bool) -> None:
        """``failed``: whether an exception ends the process."""
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


def close_older(place: tuple[str, str], stores: Sequence[object]) -> None:
    """Close those of this process that save the same run into the same store: a notebook's cell was run again."""
    for older in list(_open) if _pid == os.getpid() else ():
        if older.place == place:
            log.warning("a new Checkpointer of run %s in %s closes the older one, which was still open", *place)
            try:
                older.give_way(stores)
            except Exception:
                log.exception("the older checkpointer of run %s could not be closed", place[0])


def _finish_all() -> None:
    if _pid != os.getpid():
        return
    failed = getattr(sys, "last_value", None) is not None  # what the interpreter has just printed
    for checkpointer in list(_open):
        try:
            checkpointer.finish_at_exit(failed=failed)
        except Exception:
            log.exception("a checkpointer could not be closed at the end of the process")
