"""What every command shares: texts, tables and documents in, terminal output, JSON or files out."""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table

from deepvm.errors import UsageError, printable
from deepvm.units import format_days

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LATE_S = 1.0  # until work that has not ended gets a bar


class SafeConsole(Console):
    """Shows control characters as escapes, so that untrusted text cannot control the terminal. Untrusted markup must go
    through ``safe``, or be a Text."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)


def safe(text: str) -> str:
    """Escape untrusted text for a table or between markup, with its final width."""
    return escape(printable(text))


console = SafeConsole(highlight=False, emoji=False)
stderr = SafeConsole(stderr=True, highlight=False, emoji=False)

JsonFlag = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")]


def print_json(document: object) -> None:
    sys.stdout.write(_NOT_ASCII.sub(_escaped, json_text(document, ensure_ascii=False)) + "\n")


def json_text(document: object, *, ensure_ascii: bool = True) -> str:
    """Format a document as strict JSON. A number that is not finite becomes null."""
    try:
        return json.dumps(document, indent=2, allow_nan=False, ensure_ascii=ensure_ascii)
    except ValueError:
        return json.dumps(_finite(document), indent=2, allow_nan=False, ensure_ascii=ensure_ascii)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


_NOT_ASCII = re.compile(r"[^\n -~]")


def _escaped(found: re.Match[str]) -> str:
    """Escape a character that is valid in JSON, but not printable in a terminal."""
    return found[0] if found[0].isprintable() else json.dumps(found[0])[1:-1]


def write_text(path: Path, text: str) -> None:
    """Write a file that the user named."""
    try:
        path.write_text(text, encoding="utf-8", newline="")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from None


def table(title: str | None = None, *headings: str) -> Table:
    """Make a table that stays readable in narrow terminals. A heading with ``>`` is right-aligned."""
    made = Table(
        title=title, box=None, title_justify="left", title_style="bold", header_style="bold cyan", pad_edge=False
    )
    for heading in headings:
        made.add_column(heading.removeprefix(">"), justify="right" if heading[:1] == ">" else "left", overflow="fold")
    return made


def price_age_note(seen: date, today: date, cloud: str = "aws") -> str | None:
    """Return a hint if prices are too old to rely on."""
    from deepvm.catalog.model import STALE_DAYS  # not at the top: `deepvm --help` then needs no NumPy

    days = (today - seen).days
    if days <= STALE_DAYS:
        return None
    cloud = cloud if cloud in ("gcp", "azure") else "aws"
    provider = "" if cloud == "aws" else f" --provider {cloud}"
    return (
        f"prices of {seen.isoformat()} are {format_days(days)}: "
        f"deepvm catalog update --source skypilot{provider}, then --catalog skypilot-{cloud}, has today's"
    )


class LateBar:
    """A bar on stderr for work of more than a second: a spinner at first, gone at the end."""

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
