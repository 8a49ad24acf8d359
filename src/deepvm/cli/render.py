"""What every command shares: where output goes, and how it looks."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table

from deepvm.catalog.model import STALE_DAYS
from deepvm.errors import UsageError, printable
from deepvm.units import format_days


class SafeConsole(Console):
    """Shows control characters as escapes, whatever they come with: a stranger's name cannot steer the terminal.
    Markup is another matter: what is not ours goes through ``safe``, or is a Text."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)


def safe(text: str) -> str:
    """A stranger's words for a table or between markup: laid out as they will be shown."""
    return escape(printable(text))


console = SafeConsole(highlight=False, emoji=False)
stderr = SafeConsole(stderr=True, highlight=False, emoji=False)

JsonFlag = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")]


def print_json(document: object) -> None:
    """Strict JSON: what is not a number (NaN, infinity) is a mistake of ours, not the reader's problem."""
    text = json.dumps(document, indent=2, allow_nan=False, ensure_ascii=False)
    sys.stdout.write(_UNPRINTABLE.sub(_escaped, text) + "\n")


def _escaped(found: re.Match[str]) -> str:
    """A character that JSON may have in a string, but a terminal should not see."""
    character = found[0]
    return character if character == "\n" or character.isprintable() else json.dumps(character)[1:-1]


_UNPRINTABLE = re.compile(r"[^\n -~]")


def write_text(path: Path, text: str) -> None:
    """Write a file that the user named."""
    try:
        path.write_text(text, encoding="utf-8", newline="")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from None


def table(title: str | None = None) -> Table:
    """A table that stays readable in narrow terminals: no outer box, wrapped titles."""
    return Table(
        title=title,
        box=None,
        title_justify="left",
        title_style="bold",
        header_style="bold cyan",
        pad_edge=False,
    )


def price_age_note(seen: date, today: date) -> str | None:
    """A hint where prices are too old to rely on."""
    days = (today - seen).days
    if days <= STALE_DAYS:
        return None
    return (
        f"prices of {seen.isoformat()} are {format_days(days)}: deepvm catalog update --source skypilot fetches today's"
    )
