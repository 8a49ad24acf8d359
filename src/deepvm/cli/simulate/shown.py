"""What ``deepvm simulate`` and ``deepvm backtest`` show: a result in, tables and remarks out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.markup import escape

from deepvm.cli.render import console, table
from deepvm.units import format_bytes, format_count

if TYPE_CHECKING:
    from deepvm.simulate import Backtests

_LARGE_USD, _SMALL_USD = 1000, 10  # costs of a row are rounded alike: to dollars, to dimes, to cents
_HEADINGS = (">$ p50", ">p5 to p95", ">h p50", ">h p95", ">missed", ">h lost", ">moves", ">regret")


def show(result: Backtests) -> None:
    """Print a table for each market, one for all of them, and what they rest on."""
    job, document = result.job, result.to_json()
    due = "no deadline" if job.deadline_h is None else f"deadline {job.deadline_h:g} h"
    size = format_bytes(job.checkpoint_bytes)
    low, high = min(m.job.machines for m in result.markets), max(m.job.machines for m in result.markets)
    machines = format_count(high, "machine") if low == high else f"{low} to {high} machines"
    console.print(f"[bold]{machines}, {job.work_h:.4g} h of work, {size} of checkpoint, {due}[/]")
    markets = document["markets"]
    for market in markets if len(markets) > 1 else []:
        console.print()
        console.print(_rows(market["market"], market))
    console.print()
    on = f"{len(markets)} markets" if len(markets) > 1 else markets[0]["market"]
    console.print(_rows(f"{format_count(document['starts'], 'start')} on {on}", document))
    for line in _remarks(document):
        console.print(escape(line), style="dim", soft_wrap=True)


def _rows(title: str, document: dict[str, Any]) -> Any:
    rows = table(escape(title), "strategy", *_HEADINGS)
    rows.collapse_padding = True
    for column in rows.columns:
        column.no_wrap = True
    for row in document["strategies"]:
        cost, hours = row["cost_usd"], row["hours"]
        digits = 0 if cost["p95"] >= _LARGE_USD else 1 if cost["p95"] >= _SMALL_USD else 2
        middle, low, high = (f"{cost[name]:,.{digits}f}" for name in ("p50", "p5", "p95"))
        cells = [middle, f"{low} to {high}"]
        if hours is None:
            cells += ["-"] * 5
        else:
            cells += [f"{hours['p50']:.1f}", f"{hours['p95']:.1f}", f"{row['missed']:.1%}"]
            cells += [f"{row['lost_hours']:.2f}", f"{row['moves']:.1f}"]
        rows.add_row(row["name"], *cells, "-" if row["regret"] is None else f"{row['regret']:+.1%}")
    return rows


def _remarks(document: dict[str, Any]) -> list[str]:
    history = document["history"]
    known = "" if history["known_hours"] is None else f", plans knew {history['known_hours']:.0f} h in the median"
    lines = [f"regret: cost over the oracle's lower bound; the market has {history['hours']:.0f} h{known}"]
    if document["history"]["note"] is not None:
        lines.append(f"confidence: {document['history']['note']}")
    elif document["coverage"] is not None:
        lines.append(f"confidence: {document['coverage']:.1%} of the starts kept the promised cost and time")
    lines += document["worse_than"]
    lines += document["notes"]
    lines += [f"left out: {name}: {why}" for name, why in document["left_out"].items()]
    return lines
