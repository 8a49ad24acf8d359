"""What all commands of ``deepvm calibrate`` share: options, lists of numbers, a progress bar, an orderly end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from deepvm.cli.render import console, stderr
from deepvm.errors import DeepvmError, UsageError

MOST_COUNTS = 1000
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="The profile: written after each point, and continued if it exists."),
]
Figure = Annotated[Path | None, typer.Option("--figure", help="Draw it (.svg, .png, .pdf).")]


def parse_counts(text: str, option: str) -> tuple[int, ...]:
    """Parse ``1,2,4`` or ``1..4`` or both: each number once, in order."""
    found: set[int] = set()
    for part in (part.strip() for part in text.split(",")):
        first, dots, last = part.partition("..")
        try:
            begin, end = int(first), int(last) if dots else int(first)
        except ValueError:
            raise UsageError(f"{option} {text[:80]!r} is not a list of numbers: write 1,2,4 or 1..4") from None
        if end - begin >= MOST_COUNTS:
            raise UsageError(f"{option} {text[:80]!r} has {end - begin + 1} numbers: give at most {MOST_COUNTS}")
        found.update(range(begin, end + 1))
    return tuple(sorted(found))


def check_figure(path: Path | None) -> None:
    """Refuse a figure that cannot be drawn before anything is measured."""
    if path is not None:
        from deepvm.drawing.canvas import check_paths

        check_paths([path])


@contextmanager
def measuring(output: Path | None) -> Iterator[Callable[[str, int, int], None]]:
    """Yield what moves a progress bar. SIGTERM and SIGHUP end the calibration like Ctrl-C: processes and networks are
    removed on the way out, and the file keeps what was measured."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    bar = Progress(
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=stderr, transient=True, disable=not stderr.is_terminal,
    )  # fmt: skip
    ours = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGTERM, signal.SIGHUP) if ours else ()
    before = {number: signal.signal(number, _interrupt) for number in numbers}
    try:
        with bar:
            task = bar.add_task("starting", total=None)
            yield lambda what, done, steps: bar.update(task, description=escape(what), completed=done, total=steps)
    except KeyboardInterrupt:
        kept = f"{output} has what was measured, and the same command continues" if output else "give -o to continue"
        raise DeepvmError(f"interrupted: {kept}") from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def show_files(*paths: Path | None) -> None:
    for path in paths:
        if path is not None:
            console.print(escape(f"written to {path}"), style="dim", soft_wrap=True)


def show_kept(kept: int, points: int, what: str = "points") -> None:
    if kept:
        console.print(f"{kept} of {points} {what} were in the file already", style="dim")
