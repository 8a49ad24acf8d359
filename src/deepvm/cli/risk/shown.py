"""Plans under a market for the terminal: recommendations in; a table, a conduct in words and a drawing out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from deepvm.cli.render import console, table
from deepvm.plan import Recommendation
from deepvm.units import format_count, format_usd

if TYPE_CHECKING:
    from deepvm.plan.result import Expected
    from deepvm.plan.risk.reasons import Change, RiskReasons
    from deepvm.policy.conduct import Conduct

_BAR = 32  # characters of the longest bar
_EIGHTHS = " ▏▎▍▌▋▊▉"
_TIERS = {
    "memory": "into memory nodes",
    "durable": "into a durable store",
    "anchor": "into the memory of the anchor",
}


def columns(rows: Table) -> None:
    """Add the headings of ``cells``."""
    for heading in ("expect $", "p95", "hours", "p95", "late"):
        rows.add_column(heading, justify="right")


def cells(expected: Expected) -> list[str]:
    document = expected.to_json()
    cost, hours = document["cost_usd"], document["hours"]
    return [
        f"{cost['mean']:,.2f}",
        f"{cost['p95']:,.2f}",
        f"{hours['mean']:,.1f}",
        f"{hours['p95']:,.1f}",
        f"{document['missed']:.1%}",
    ]


def conduct_text(conduct: Conduct, nodes: int) -> str:
    """Format a conduct: ``in us-east-1; waits for all 7 machines at a loss; saves every 196s ...``."""
    zones = f"in {conduct.zones[0]}" if len(conduct.zones) == 1 else f"moves between {', '.join(conduct.zones)}"
    machines = "1 machine" if nodes == 1 else f"all {nodes} machines"
    fewer = format_count(conduct.least_workers, "machine")
    loss = f"waits for {machines}" if conduct.at_loss == "wait" else f"shrinks to {fewer}"
    replicas = f" with {conduct.replicas} replicas" if conduct.replicas > 1 else ""
    late = "no on-demand fallback" if conduct.fallback == "none" else conduct.fallback
    return f"{zones}; at a loss {loss}; saves {conduct.save} {_TIERS[conduct.tier]}{replicas}; {late}"


def show_conduct(best: Recommendation, failover: Sequence[Recommendation], advice: Sequence[str]) -> None:
    """Print how the best plan is run, what comes if the market has none of it, and advice."""
    if best.conduct is not None:
        console.print(escape(f"conduct: {conduct_text(best.conduct, best.nodes)}"), soft_wrap=True)
    if failover:
        names = [f"{r.nodes} × {r.worker.instance} in {r.worker.zone or r.worker.region}" for r in failover]
        console.print(escape(f"if the market has none: {'; '.join(names)}"), style="dim", soft_wrap=True)
    if best.expected is not None:
        history = best.expected.risk.history
        rests = f"risk rests on {history}" if history.zones else history.origin  # no zones: a plan without a market
        console.print(escape("; ".join([rests, *best.expected.notes])), style="dim", soft_wrap=True)
    for line in advice:
        console.print(escape(line), style="yellow", soft_wrap=True)


def show_distribution(expected: Expected, deadline_h: float | None) -> None:
    """Draw cost and time of the first recommendation as bars."""
    document = expected.risk.distribution()
    for name, title, unit in (("cost_usd", "Cost", "$"), ("hours", "Time", "h")):
        starts = len(expected.risk.outcomes.hours)
        rows = table(f"\n{title}  over {format_count(starts, 'start')}", f">{unit}", "share", "")
        edges, shares = document[name]["edges"], document[name]["share"]
        most = max(shares)
        for (low, high), share in zip(pairwise(edges), shares, strict=True):
            late = name == "hours" and deadline_h is not None and low >= deadline_h
            bar = Text(_bar(share / most), style="red" if late else "cyan")
            rows.add_row(f"{low:,.1f} to {high:,.1f}" if high > low else f"{low:,.1f}", f"{share:.1%}", bar)
        console.print(rows)
    if deadline_h is not None:
        console.print(f"deadline {deadline_h:g} h: {expected.missed:.1%} of the starts are late", style="dim")


def _bar(share: float) -> str:
    eighths = round(share * _BAR * 8)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def reason_rows(why: RiskReasons) -> Iterator[tuple[str, str]]:
    """Name what the risk consists of."""
    for name, change in (("preemption", why.preemption), ("checkpoints", why.tier), ("zones", why.zone)):
        if change is not None:
            yield name, change_text(change)
    if why.fallback is not None:
        yield "fallback", why.fallback
    if why.prices is not None:
        yield "price age", why.prices
    if why.guess is not None:
        yield "a guess", why.guess


def change_text(change: Change) -> str:
    """Format a change: ``preemption costs $3.20 and 1.4 h``."""
    usd, hours = format_usd(abs(change.usd)), f"{abs(change.hours):.2f} h"
    if (change.usd >= 0) == (change.hours >= 0):
        return f"{change.what} {_verb(change.usd)} {usd} and {hours}"
    return f"{change.what} {_verb(change.usd)} {usd} and {_verb(change.hours)} {hours}"


def _verb(change: float) -> str:
    return "costs" if change >= 0 else "saves"
