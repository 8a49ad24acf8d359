"""``deepvm reproduce``: reproduce the paper's results and compare them. Renders what the paper room returns."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from deepvm.cli.render import JsonFlag, console, print_json, stderr, table

if TYPE_CHECKING:
    from deepvm.paper import Reproduction

_NOTE_COLUMNS = 130  # of a terminal that has room for notes


def command(
    out: Annotated[Path, typer.Option("--out", help="The folder for tables and figures.")] = Path("reproduction"),
    as_json: JsonFlag = False,
) -> None:
    """Reproduce the paper's tables and figures, and compare them with the published ones."""
    result = _with_progress(out)
    if as_json:
        print_json(result.to_json())
    else:
        _show(result)


def _with_progress(out: Path) -> Reproduction:
    # Imported late: other commands need not wait for it.
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from deepvm.paper import reproduce

    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(),
        console=stderr, transient=True, disable=not stderr.is_terminal,
    )  # fmt: skip
    with bar:
        task = bar.add_task("starting", total=None)
        return reproduce(out, lambda what, done, steps: bar.update(task, description=what, completed=done, total=steps))


def _show(result: Reproduction) -> None:
    notes = console.width >= _NOTE_COLUMNS
    for part in dict.fromkeys(c.part for c in result.comparisons):
        rows = table(part, "what", ">published", ">ours", ">difference")
        rows.columns[0].ratio = 3
        if notes:
            rows.add_column("note", style="dim", overflow="fold", ratio=2)
        for c in (c for c in result.comparisons if c.part == part):
            published, ours, difference = c.cells()
            colour = "green" if c.agrees else "yellow"
            cells = [escape(c.what), escape(published), escape(ours), f"[{colour}]{escape(difference)}[/]"]
            rows.add_row(*cells, *([escape(c.note)] if notes else []))
        console.print(rows)
        console.print()
    reproduced = [c for c in result.comparisons if c.kind == "reproduced"]
    same = sum(c.agrees for c in reproduced)
    console.print(f"{same} of {len(reproduced)} figures of the published method came out the same;")
    console.print("the others compare models with measurements, and the paper's text with its data.")
    console.print(f"{len(result.files)} files written to {escape(str(result.out))}", style="dim", soft_wrap=True)
