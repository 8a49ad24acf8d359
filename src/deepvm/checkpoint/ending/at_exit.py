"""Finish the saves under way at a normal end of the interpreter, also if a script never calls close().

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

    def give_way(self, stores: Sequence[object] = (), *, close: bool) -> None:
        """Finish what is under way, or close: a newer one replaces it, with these stores."""
        ...

    def finish_at_exit(self, *, failed: str) -> None:
        """``failed``: the exception that ends the process, if one does."""
        ...


_open: weakref.WeakSet[Finishing] = weakref.WeakSet()
_pid: int | None = None  # of the process that registered: a fork inherits handlers that are not its own


def register(checkpointer: Finishing) -> None:
    """Finish this one at exit, unless it is closed before."""
    global _open, _pid
    if _pid != os.getpid():
        _open, _pid = weakref.WeakSet(), os.getpid()
        at_exit = getattr(threading, "_register_atexit", atexit.register)
        with suppress(RuntimeError):  # the end has begun already
            at_exit(_finish_all)
    _open.add(checkpointer)


def unregister(checkpointer: Finishing) -> None:
    _open.discard(checkpointer)


class OlderCheckpointers:
    """Those of this process that are open and save the same run into the same store: a notebook's cell was run again.
    A new one lets them finish, so that it can restore what they save, and closes them once it trains."""

    def __init__(self, place: tuple[str, str]) -> None:
        same = [one for one in list(_open) if one.place == place] if _pid == os.getpid() else []
        self._place, self._found = place, weakref.WeakSet(same)

    def finish(self) -> None:
        for older in list(self._found):
            older.give_way(close=False)

    def close(self, stores: Sequence[object]) -> None:
        for older in list(self._found):
            self._found.discard(older)
            if older in _open:
                log.warning("a new Checkpointer of run %s in %s closes the older one, still open", *self._place)
                older.give_way(stores, close=True)


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
