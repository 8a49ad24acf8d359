"""A bar on stderr for work of more than a second: counts of what is done in, a line that disappears at the end out."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

from deepvm.cli.render import stderr

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LATE_S = 1.0


class LateBar:
    """Shows ``what`` with a spinner at first, and the bar once it is late."""

    def __init__(self, what: str) -> None:
        self._what, self._status = what, stderr.status(what)
        self._bar: tuple[Progress, TaskID] | None = None
        self._begun_s = time.monotonic()

    def __enter__(self) -> LateBar:
        self._status.start()
        return self

    def __call__(self, done: int, every: int) -> None:
        if self._bar is None and stderr.is_terminal and time.monotonic() - self._begun_s > LATE_S:
            self._status.stop()
            self._bar = self._started()
        if self._bar is not None:
            bar, task = self._bar
            bar.update(task, completed=done, total=every)

    def _started(self) -> tuple[Progress, TaskID]:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn  # few plans are late

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        bar = Progress(*columns, console=stderr, transient=True)
        bar.start()
        return bar, bar.add_task(self._what)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._status.stop()
        if self._bar is not None:
            self._bar[0].stop()
