"""``deepvm sweep``: every policy at every budget. Renders the points of ``plan.sweep``."""

from __future__ import annotations

import csv
import io
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TextIO

import typer
from rich.markup import escape

from deepvm import plan as planning
from deepvm.catalog import Catalog
from deepvm.cli.options import takes_request
from deepvm.cli.render import JsonFlag, console, print_json, table, write_text
from deepvm.plan import POLICIES, Point, Request
from deepvm.units import parse_usd

_COLUMNS = ("policy", "budget", "architecture", "instance", "count", "hourly_usd", "performance")


@takes_request
def command(
    *,
    first: Annotated[str, typer.Option("--from", help="The first budget, in dollars an hour.")] = "0",
    last: Annotated[str, typer.Option("--to", help="The last budget.")] = "10",
    step: Annotated[str, typer.Option(help="From one budget to the next.")] = "0.1",
    policy: Annotated[list[str] | None, typer.Option(help="Only these policies, repeatable [all four].")] = None,
    figure: Annotated[Path | None, typer.Option(help="Draw performance over budget (.svg, .png, .pdf).")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the points to a CSV file.")] = None,
    as_json: JsonFlag = False,
    catalog: Catalog,
    request: Request,
) -> None:
    """Compare the policies over a range of budgets."""
    policies = tuple(dict.fromkeys(policy or POLICIES))
    for name in policies:
        replace(request, policy=name)  # refuse an unknown name before the search
    at_usd = planning.budgets(parse_usd(first), parse_usd(last), parse_usd(step))
    points = planning.sweep(catalog, request, at_usd, policies)
    if output is not None:
        text = io.StringIO(newline="")
        _write_csv(points, text)
        write_text(output, text.getvalue())
    if figure is not None:
        from deepvm.paper.figures import draw_sweep

        draw_sweep(points, figure, title=f"{catalog.name}, by {request.objective}")
    if as_json:
        print_json({"points": [point.to_json() for point in points]})
    elif console.is_terminal or output is not None or figure is not None:
        _show(points, policies)
        for path in (output, figure):
            if path is not None:
                console.print(escape(f"written to {path}"), style="dim", soft_wrap=True)
    else:
        _write_csv(points, sys.stdout)


def _write_csv(points: list[Point], file: TextIO) -> None:
    writer = csv.DictWriter(file, _COLUMNS)
    writer.writeheader()
    writer.writerows(point.to_json() for point in points)


def _show(points: list[Point], policies: tuple[str, ...]) -> None:
    """Print the budgets at which a choice changes, so that a long sweep fits a screen."""
    by_budget: dict[float, dict[str, Point]] = {}
    for point in points:
        by_budget.setdefault(point.budget_usd, {})[point.policy] = point
    rows = table("Performance by policy (one line per changed choice)", ">$/h", *(f">{name}" for name in policies))
    before: list[tuple[str | None, str | None]] = []
    for budget, found in by_budget.items():
        now = [(found[p].architecture, found[p].instance) for p in policies]
        if now != before:
            rows.add_row(f"{budget:g}", *(_cell(found[p]) for p in policies))
        before = now
    console.print(rows)


def _cell(point: Point) -> str:
    if point.performance is None:
        return "-"
    return escape(f"{point.performance:,.0f} ({point.count} × {point.instance})")
