"""A bar on stderr for work of more than a second: counts of what is done in, a line that disappears at the end out."""

from __future__ import annotations

import time
from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.status import Status

from deepvm.cli.render import stderr

LATE_S = 1.0


class LateBar:
    """Shows ``what`` with a spinner at first, and the bar once it is late."""

    def __init__(self, what: str) -> None:
        self._status: Status | None = stderr.status(what)
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), console=stderr, transient=True
        )
        self._task = self._bar.add_task(what)
        self._begun_s = time.monotonic()

    def __enter__(self) -> LateBar:
        if self._status is not None:
            self._status.start()
        return self

    def __call__(self, done: int, every: int) -> None:
        late = time.monotonic() - self._begun_s > LATE_S
        if self._status is not None and late and stderr.is_terminal:
            self._status.stop()
            self._status = None
            self._bar.start()
        self._bar.update(self._task, completed=done, total=every)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()
        else:
            self._bar.stop()
