"""A run's report -> tables in the terminal, or JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from rich.table import Table
from rich.text import Text

from deepvm.cli.render import console, print_json, table
from deepvm.runtime.ledger.report import Report
from deepvm.units import format_count, format_seconds

_ROWS = 12  # of each list; --json has all
_OUTCOMES = {"finished": "bold green", "running": "bold cyan", "failed": "bold red"}
_CHOICES = {"save": "save now", "finish": "finish the save", "rely": "rely on the last"}
_PARTS = {
    "detect_s": "detect",
    "capacity_s": "capacity",
    "regroup_s": "regroup",
    "start_s": "start",
    "restore_s": "restore",
    "first_step_s": "first step",
}


def show_report(report: Report, as_json: bool = False) -> None:
    if as_json:
        print_json(report.to_json())
        return
    _show_summary(report)
    _show_bill(report)
    _show_pauses(report)
    _show_notices(report)
    _show_restores(report)
    _show_forecast(report)
    sentences = [*(f"changed: {change}" for change in report.changes), *(f"note: {note}" for note in report.notes)]
    if sentences:
        console.print()
    for sentence in sentences:
        console.print(_text(sentence, "dim"))
    if report.profile is not None:
        console.print()
        console.print(_text(f"measured: {report.profile}  (for deepvm plan --profile)", "dim"), soft_wrap=True)
    for warning in report.warnings[-_ROWS:]:
        console.print(_text(f"warning: {warning}", "yellow"))


def usd_texts(amounts: Sequence[float | None]) -> list[str]:
    """Format amounts with equal decimals, enough for two digits of the smallest: $0.0021."""
    decimals = max([2, *(_decimals(amount) for amount in amounts if amount)])
    return ["?" if amount is None else f"{'-' * (amount < 0)}${abs(amount):,.{decimals}f}" for amount in amounts]


def _decimals(amount: float) -> int:
    if abs(amount) >= 100:
        return 2
    return 4 if abs(amount) >= 0.001 else min(8, 1 - math.floor(math.log10(abs(amount))))


def _show_summary(report: Report) -> None:
    sessions = "" if report.sessions <= 1 else f", {report.sessions} sessions"
    head = _text(f"{report.run or 'run'}  ", "bold")
    head.append(report.outcome, style=_OUTCOMES.get(report.outcome, "bold yellow"))
    head.append(f"  {format_seconds(report.wall_s)}{sessions}")
    console.print(head)
    if report.why:
        console.print(_text(report.why, "yellow"))
    console.print()
    saves, newest = report.checkpoints, report.checkpoints.newest
    again = f" ({format_seconds(report.repeated_s)})" if report.steps_repeated else ""
    stalls = f"{format_seconds(report.stalled_s)} by saves"
    if report.pauses:
        stalls += f"; stood still {format_seconds(report.stood_still_s)} in {format_count(len(report.pauses), 'pause')}"
    lines = [
        ("steps", f"{report.steps_done:,} done, {report.steps_lost:,} lost, {report.steps_repeated:,} repeated{again}"),
        ("stalled", stalls),
        ("checkpoints", f"{saves.made} made, {saves.durable} durable, {saves.skipped} skipped, {saves.failed} failed"),
    ]
    if saves.failed and not saves.made:
        lines.append(("", "NOTHING was saved: every save failed"))
    if saves.last_problem:
        lines.append(("", f"last problem: {saves.last_problem}"))
    if newest is not None:
        where = " and ".join(newest.places) or "an unknown place"
        lines.append(("newest", f"step {newest.step:,} in {where}{'' if newest.durable else ', not durable'}"))
    if report.goodput is not None:
        lines.append(("goodput", f"{report.goodput:.1%} of {format_seconds(report.bill.machine_s)} paid machine time"))
    lines += _conduct(report)
    rows = _table(("", ""), header=False)
    rows.columns[0].style = "cyan"
    for name, text in lines:
        rows.add_row(name, _text(text))
    console.print(rows)


def _conduct(report: Report) -> list[tuple[str, str]]:
    """Return the policies that the run followed, and who chose them."""
    found = []
    for name, title in (("save", "saves"), ("after_loss", "after a loss")):
        policy = (report.conduct or {}).get(name)
        if isinstance(policy, Mapping) and policy.get("policy"):
            by = {"plan": " (the plan's)", "default": " (default)"}.get(str(policy.get("by")), "")
            found.append((title, f"{policy['policy']}{by}"))
    deadline_s, fallback = ((report.conduct or {}).get(name) for name in ("deadline_s", "fallback"))
    if isinstance(deadline_s, int | float) and fallback not in (None, "none"):
        found.append(("deadline", f"{format_seconds(deadline_s)}; {fallback} (the plan's)"))
    return found


def _show_bill(report: Report) -> None:
    bill = report.bill
    if not bill.roles:
        return
    rows = _table(("role", ">machines", ">time", ">dollars", ">on demand"), "Bill")
    dollars = usd_texts([*(role.usd for role in bill.roles), *(role.fallback_usd for role in bill.roles), bill.usd])
    on_demand = usd_texts([*(role.on_demand_usd for role in bill.roles), bill.on_demand_usd])
    for role, usd, fallback_usd, instead in zip(
        bill.roles, dollars, dollars[len(bill.roles) :], on_demand, strict=False
    ):
        count = str(role.machines) + (f" ({role.hires} hired)" if role.hires > role.machines else "")
        rows.add_row(_text(role.role), count, format_seconds(role.machine_s), usd, instead)
        if role.fallback_s:
            rows.add_row(_text("  of it on demand"), "", format_seconds(role.fallback_s), fallback_usd, "")
    rows.add_row("total", "", format_seconds(bill.machine_s), dollars[-1], on_demand[-1], style="bold")
    console.print(rows)
    saved = bill.saved_usd
    if saved is not None and bill.on_demand_usd:
        word = "saved against on demand" if saved >= 0 else "more than on demand"
        (text,) = usd_texts([abs(saved)])
        console.print(
            f"{text} {word}, {abs(saved) / bill.on_demand_usd:.0%}", style="green" if saved >= 0 else "yellow"
        )


def _show_pauses(report: Report) -> None:
    if report.losses:
        rows = _table((">at", "machine", "why"), f"Losses  {_reasons(report)}")
        for loss in report.losses[-_ROWS:]:
            rows.add_row(_at(report, loss.at_s), _text(loss.machine), _text(loss.why))
        _print(rows, len(report.losses))
    if report.pauses:
        waited = any("capacity_s" in pause.parts for pause in report.pauses)
        shown = {part: name for part, name in _PARTS.items() if waited or part != "capacity_s"}
        columns = (">at", ">stood still", *(f">{name}" for name in shown.values()))
        rows = _table(columns, "Pauses  from one finished step to the next")
        for pause in report.pauses[-_ROWS:]:
            parts = {"first_step_s": "none" if not pause.recovered else "-"}
            parts |= {name: format_seconds(seconds) for name, seconds in pause.parts.items()}
            cells = [parts.get(part, "-") for part in shown]
            rows.add_row(_at(report, pause.at_s), format_seconds(pause.seconds), *cells)
        _print(rows, len(report.pauses))


def _reasons(report: Report) -> str:
    whys = [loss.why for loss in report.losses]
    return ", ".join(f"{whys.count(why)} {why}" for why in dict.fromkeys(whys))


def _show_notices(report: Report) -> None:
    if not report.notices:
        return
    rows = _table((">at", "machine", "notice", ">left", "decision"), "Notices")
    for notice in report.notices[-_ROWS:]:
        choice = "none" if notice.choice is None else _CHOICES.get(notice.choice, notice.choice)
        rows.add_row(
            _at(report, notice.at_s),
            _text(notice.machine),
            _text(notice.action or "?"),
            "?" if notice.seconds_left is None else format_seconds(notice.seconds_left),
            _text(choice + (f": {notice.why}" if notice.why else "")),
        )
    _print(rows, len(report.notices))


def _show_restores(report: Report) -> None:
    if not report.restores:
        return
    rows = _table((">at", ">step", ">took", "from"), "Restores")
    for restore in report.restores[-_ROWS:]:
        rows.add_row(
            _at(report, restore.at_s),
            "?" if restore.step is None else f"{restore.step:,}",
            "?" if restore.seconds is None else format_seconds(restore.seconds),
            _text((restore.place or "?") + (", prefetched" if restore.fetched else "")),
        )
    _print(rows, len(report.restores))


def _show_forecast(report: Report) -> None:
    forecast = report.forecast
    planned, happened = usd_texts([forecast.planned_usd_per_hour, forecast.usd_per_hour])
    rows = _table(("", ">planned", ">happened"), "Forecast")
    rows.add_row("dollars an hour", planned, "-" if forecast.usd_per_hour is None else happened)
    rows.add_row("stood still after a loss", _seconds(forecast.planned_pause_s), _seconds(forecast.median_pause_s))
    if forecast.median_restore_s is not None:
        rows.add_row("of it restoring", "", _seconds(forecast.median_restore_s))
    console.print(rows)


def _table(columns: Iterable[str], title: str | None = None, *, header: bool = True) -> Table:
    """Return a table; ``>`` before a column's name aligns it to the right."""
    if title:
        console.print()
    rows = table(title)
    rows.show_header = header
    for column in columns:
        right = column.startswith(">")
        rows.add_column(column.lstrip(">"), justify="right" if right else "left", no_wrap=right, overflow="fold")
    return rows


def _print(rows: Table, among: int) -> None:
    console.print(rows)
    if among > _ROWS:
        console.print(f"the last {_ROWS} of {among:,}; --json has all", style="dim")


def _at(report: Report, at_s: float) -> str:
    """Return the time since the start of the run: 2:05, 26:02:05."""
    minutes, seconds = divmod(round(max(0.0, at_s - (report.started_s or 0.0))), 60)
    return f"{minutes}:{seconds:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else format_seconds(seconds)


def _text(text: str, style: str = "") -> Text:
    """Return a text without markup and control characters."""
    return Text("".join(c if c.isprintable() else " " for c in text), style=style, overflow="fold")
