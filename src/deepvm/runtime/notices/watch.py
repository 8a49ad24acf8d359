"""One thread on each machine that polls its source of notices, and reports each notice once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from deepvm.runtime.notices.base import Notice, NoticeSource

log = logging.getLogger("deepvm.notices")


class Watch:
    """Calls ``on_notice``, in a thread of its own, for every new notice: a termination after a recommendation is new,
    and so is one whose time has changed."""

    def __init__(self, source: NoticeSource, on_notice: Callable[[Notice], object]) -> None:
        self._source, self._on_notice = source, on_notice
        self._reported: set[Notice] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="deepvm-notices", daemon=True)

    def start(self) -> Watch:
        self._thread.start()
        return self

    def close(self, timeout_s: float = 5.0) -> bool:
        """Stop. No call begins after this one. True if the thread has ended within the time."""
        self._closing.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def __enter__(self) -> Watch:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._poll()
            except Exception:  # the next notice must still be reported
                log.exception("a notice could not be handled")
            self._closing.wait(self._source.interval_s)

    def _poll(self) -> None:
        notice = self._source.poll()
        if notice is None or notice in self._reported or self._closing.is_set():
            return
        self._reported.add(notice)
        self._on_notice(notice)
