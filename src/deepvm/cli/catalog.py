"""``deepvm catalog``: list, show, update, import, check and compare catalogues, and show their past prices."""

from __future__ import annotations

from datetime import date, datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from deepvm.catalog import library
from deepvm.catalog import update as updates
from deepvm.catalog.check import Severity
from deepvm.catalog.check import check as find_problems
from deepvm.catalog.model import Catalog
from deepvm.catalog.summary import TypeSummary, summarize
from deepvm.cli import catalog_json as documents
from deepvm.cli.render import JsonFlag, console, price_age_note, print_json, stderr, table
from deepvm.errors import DeepvmError, UsageError
from deepvm.market import catalog_history as dated
from deepvm.market.history import PriceHistory
from deepvm.units import format_seconds, format_usd

app = typer.Typer(help="What can be rented: list, show, update, import, check, history, diff.", no_args_is_help=True)

_MOVES_SHOWN = 8
_NARROW, _WIDE = 80, 110  # columns of the terminal below and above which a table has fewer or more
_COLOURS = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "dim"}


def _day_option(name: str, help_text: str) -> Any:
    return typer.Option(name, formats=["%Y-%m-%d"], help=help_text)


@app.command("list")
def list_(json: JsonFlag = False) -> None:
    """The catalogues on this machine: built-in ones first."""
    found = [(name, _load_or_problem(name)) for name in library.names()]
    if json:
        print_json({"catalogs": [documents.overview(name, catalog) for name, catalog in found]})
        return
    rows = table(None, "name", ">GPU types", ">CPU types", ">offers", "prices of")
    for name, catalog in found:
        if isinstance(catalog, str):
            rows.add_row(escape(name), "", "", "", f"[red]{escape(catalog)}[/]")
            continue
        gpus = sum(i.accelerator is not None for i in catalog.instances)
        mark = " [dim](default)[/]" if name == library.DEFAULT else ""
        counts = (gpus, len(catalog.instances) - gpus, catalog.offer_count)
        rows.add_row(escape(name) + mark, *(f"{count:,}" for count in counts), _days(catalog))
    console.print(rows)
    console.print("\n[dim]deepvm catalog show NAME shows more; your own catalogues are in[/]")
    console.print(f"[dim]{escape(str(library.directory()))}[/]", soft_wrap=True)


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="A catalogue's name, or a file.")] = library.DEFAULT,
    instance: Annotated[str | None, typer.Option(help="One machine type, with all its offers.")] = None,
    gpu: Annotated[str | None, typer.Option(help="Only types with this accelerator.")] = None,
    limit: Annotated[int, typer.Option(help="Most rows in the table; 0 shows all.", min=0)] = 60,
    json: JsonFlag = False,
) -> None:
    """The machine types of a catalogue, each with its lowest prices."""
    catalog = library.load(name)
    rows = summarize(catalog, instance=instance, gpu=gpu)
    if json:
        print_json(documents.contents(catalog, rows, offers_of=instance))
        return
    console.print(f"[bold]{escape(catalog.name)}[/]: {escape(catalog.description)}")
    console.print(f"Prices in USD an hour, seen {_days(catalog)}, the lowest of all places.\n")
    shown = rows[:limit] if limit else rows
    _print_types(shown)
    if len(shown) < len(rows):
        console.print(f"[dim]... and {len(rows) - len(shown):,} more: --limit 0, --gpu or --instance shows them[/]")
    if instance is not None:
        _print_offers(catalog, instance)
    for quota in catalog.quotas:
        console.print(f"quota {escape(quota.name)}: {quota.vcpus:g} vCPUs", style="dim")
    _print_notes(catalog)


@app.command()
def update(
    source: Annotated[str, typer.Option(help="Where from: aws, skypilot.")],
    name: Annotated[str | None, typer.Option(help="The name to keep it under [aws-REGION, skypilot-PROVIDER].")] = None,
    region: Annotated[str | None, typer.Option(help="Needed for aws; skypilot: only this region.")] = None,
    url: Annotated[str | None, typer.Option(help="Another address of SkyPilot's CSV.")] = None,
    provider: Annotated[str, typer.Option(help="Whose file of SkyPilot's.")] = "aws",
    force: Annotated[bool, typer.Option("--force", help="Even if the kept one is under an hour old.")] = False,
    history: Annotated[int | None, typer.Option(help="aws: also the spot prices of this many past days.")] = None,
    json: JsonFlag = False,
) -> None:
    """Read live AWS data, or SkyPilot's published catalogue. A failure leaves the last good one as it was."""
    if history is not None and source != "aws":
        raise UsageError("--history is for --source aws: use deepvm catalog import --git for SkyPilot's past prices")
    past = None
    with stderr.status("starting") as status:
        result = updates.update(
            source,
            region=region,
            name=name,
            url=url,
            provider=provider,
            force=force,
            progress=lambda text: status.update(escape(text)),
        )
        if history is not None:
            past = dated.update_from_aws(
                region or "", history, name=result.catalog.name, progress=lambda text: status.update(escape(text))
            )
    _print_update(result, json, past)


@app.command("import")
def import_(
    file: Annotated[Path | None, typer.Argument(help="SkyPilot's catalogue CSV (vms.csv).")] = None,
    git: Annotated[Path | None, typer.Option(help="A clone of a catalogue repository, instead of one file.")] = None,
    first: Annotated[datetime | None, _day_option("--from", "First day of the clone's commits.")] = None,
    last: Annotated[datetime | None, _day_option("--to", "Last day of the clone's commits.")] = None,
    name: Annotated[str | None, typer.Option(help="The name to keep it under [skypilot-PROVIDER].")] = None,
    provider: Annotated[str, typer.Option(help="Whose machines they are: aws, gcp, azure ...")] = "aws",
    seen: Annotated[
        datetime | None,
        typer.Option(formats=["%Y-%m-%d"], help="Day of the prices [the file's last change]."),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Import SkyPilot's catalogue CSV, and report on its rows; or, from a git clone, its prices over time."""
    if (file is None) == (git is None):
        raise UsageError("give one of the two: a catalogue's CSV file, or --git with a clone")
    if git is not None:
        if first is None or last is None or seen is not None:
            raise UsageError("--git needs --from and --to, as in --from 2026-07-01 --to 2026-07-31, and no --seen")
        with stderr.status("reading the clone") as status:
            report = dated.import_git(
                git, first=first.date(), last=last.date(), provider=provider, name=name,
                progress=lambda text: status.update(escape(text)),
            )  # fmt: skip
        _print_history_import(report, json)
        return
    if file is None or first or last:
        raise UsageError("--from and --to are for --git: a file has the prices of one day")
    with stderr.status(f"reading {escape(file.name)}"):
        result = updates.import_file(file, provider=provider, name=name, seen=seen.date() if seen else None)
    _print_update(result, json)


@app.command()
def history(
    type_: Annotated[str, typer.Argument(metavar="TYPE", help="A machine type.")],
    catalog: Annotated[str | None, typer.Option(help="A catalogue with a history, or a CSV file of prices.")] = None,
    market: Annotated[str | None, typer.Option(help="Only spot or on-demand.")] = None,
    days: Annotated[int | None, typer.Option(help="Only the last days.", min=1)] = None,
    json: JsonFlag = False,
) -> None:
    """The prices of a machine type over time, place by place."""
    prices = dated.load_history(catalog)
    document = documents.price_history(prices, type_, market=market, days=days)
    if json:
        print_json(document)
        return
    grid = table(
        f"{escape(type_)}  {document['from']} to {document['to']}, USD an hour",
        "place", "market", ">now", ">lowest", ">p75", ">highest", ">changes", "since",
    )  # fmt: skip
    for row in document["places"]:
        figures = (row[name] for name in ("usd_per_hour", "lowest", "p75", "highest"))
        cells = ("-" if usd is None else f"{usd:.4f}" for usd in figures)
        since = row["changes"][-1]["day"] if row["changes"] else "-"
        grid.add_row(escape(row["place"]), row["market"], *cells, str(len(row["changes"])), since)
    console.print(grid)


@app.command()
def diff(
    before: Annotated[str, typer.Argument(help="A catalogue's name, a file, or NAME@2026-08-01.")],
    after: Annotated[str, typer.Argument(help="The same.")],
    limit: Annotated[int, typer.Option(help="Most changes in the list; 0 shows all.", min=0)] = 20,
    json: JsonFlag = False,
) -> None:
    """What changed between two catalogues, or between two days of one."""
    changes = dated.diff(before, after)
    if json:
        print_json({"before": before, "after": after, **changes.to_json()})
        return
    _print_changes(changes, limit or None, f"From {escape(before)} to {escape(after)}")


@app.command()
def check(
    name: Annotated[str, typer.Argument(help="A catalogue's name, or a file.")],
    json: JsonFlag = False,
) -> None:
    """Check for contradictions and gaps. Exit code 1 if a plan from it would be wrong."""
    catalog = library.load(name)
    findings = find_problems(catalog, _today())
    if json:
        print_json(documents.findings(catalog, findings))
    else:
        for finding in findings:
            count = f" ({finding.count:,})" if finding.count > 1 else ""
            text = f"{finding.severity}: {finding.problem}{count}: {finding.subject}"
            console.print(escape(text), style=_COLOURS[finding.severity])
        console.print(f"{escape(catalog.name)}: {len(findings)} findings" if findings else "[green]sound[/]")
    if any(finding.severity is Severity.ERROR for finding in findings):
        raise typer.Exit(1)


def _print_types(rows: list[TypeSummary]) -> None:
    narrow, wide = console.width < _NARROW, console.width >= _WIDE
    grid = table()
    grid.add_column("type", no_wrap=True)
    grid.add_column("GPU")
    if not narrow:
        for heading in ("vCPU", "GiB", "Gbit/s", "lost %"):
            grid.add_column(heading, justify="right")
    grid.add_column("spot", justify="right", no_wrap=True)
    grid.add_column("on-demand", justify="right", no_wrap=True)
    if wide:
        grid.add_column("cheapest spot in")
        grid.add_column("seen", no_wrap=True)
    for row in rows:
        cells = [escape(row.instance.name), escape(_gpu(row))]
        if not narrow:
            cells += _facts(row)
        cells += [format_usd(c.offer.usd_per_hour) if c else "-" for c in (row.spot, row.on_demand)]
        if wide:
            cheapest = row.spot or row.on_demand
            cells += [escape(row.spot.offer.zone or row.spot.offer.region) if row.spot else "-"]
            cells += [str(cheapest.offer.seen) if cheapest else "-"]
        grid.add_row(*cells)
    console.print(grid)


def _gpu(row: TypeSummary) -> str:
    if row.instance.accelerator is None:
        return ""
    return f"{row.instance.accelerator_count:g} × {row.instance.accelerator}"


def _facts(row: TypeSummary) -> list[str]:
    """Format vCPUs, memory, sustained and burst bandwidth, and the spot machines lost in a month."""
    i = row.instance
    speeds = [f"{v:g}" if v is not None else "?" for v in (i.sustained_gbps, i.burst_gbps)]
    low, high = i.interruption_percent or (None, None)
    lost = "?" if low is None else f"> {low:g}" if high == 100 else f"{low:g}-{high:g}"
    sizes = [f"{v:g}" if v is not None else "?" for v in (i.vcpus, i.memory_gib)]
    return [*sizes, "?" if i.gbps is None else " / ".join(speeds), lost]


def _print_offers(catalog: Catalog, instance: str) -> None:
    offers = sorted(catalog.offers(instance), key=lambda o: (o.market, o.usd_per_hour, o.region))
    ranges = any(offer.usd_low is not None for offer in offers)
    grid = table("\nIts offers")
    grid.add_column("market", no_wrap=True)
    grid.add_column("place", overflow="fold")
    grid.add_column("USD/h", justify="right", no_wrap=True)
    if ranges:
        grid.add_column("in its zones", justify="right")
    grid.add_column("seen", no_wrap=True)
    for offer in offers:
        known = offer.usd_low is not None and offer.usd_high is not None
        spread = [f"{offer.usd_low:g} to {offer.usd_high:g}" if known else ""] if ranges else []
        place = escape(offer.zone or offer.region)
        grid.add_row(str(offer.market), place, format_usd(offer.usd_per_hour), *spread, str(offer.seen))
    console.print(grid)


def _print_history_import(report: dated.HistoryImport, json: bool) -> None:
    if json:
        print_json(documents.history_import(report))
        return
    span = f"{report.history.first} to {report.history.last}"
    console.print(f"[bold]{escape(report.catalog.name)}[/]: {report.days:,} days read; prices from {span}")
    changes = sum(len(days) for days, _ in report.history.changes.values())
    console.print(
        f"{changes:,} changes of {len(report.history.changes):,} prices in {report.history_path}", style="dim"
    )
    console.print(
        f"Plan as of a day: deepvm plan --catalog {escape(report.catalog.name)} --as-of {report.history.first}"
    )


def _print_update(result: updates.Update, json: bool, past: PriceHistory | None = None) -> None:
    if json:
        print_json(documents.updated(result, past))
        return
    if past is not None:
        console.print(f"Prices from {past.first} to {past.last} are in its history.")
    catalog = result.catalog
    what = "written" if result.fresh else f"is {format_seconds(result.age_s)} old and was not read again (use --force)"
    counts = f"{len(catalog.instances):,} types, {catalog.offer_count:,} offers"
    console.print(f"[bold]{escape(catalog.name)}[/] {what}: {counts}")
    console.print(f"prices seen {_days(catalog)}; {escape(str(result.path))}", style="dim", soft_wrap=True)
    if result.report is not None:
        report = result.report
        console.print(f"{report.kept:,} of {report.rows:,} rows were kept.")
        grid = table(None, ">rows", "what", "why", ">first line")
        for what, counted in (("flagged", report.flagged), ("left out", report.left_out)):
            for count in counted:
                grid.add_row(f"{count.rows:,}", what, escape(count.reason), str(count.first_line))
        if grid.row_count:
            console.print(grid)
        if report.completed_types:
            console.print(f"{report.completed_types:,} types got bandwidth and interruptions of {library.DEFAULT}.")
    if result.changes is not None:
        _print_changes(result.changes)
    console.print(f"Plan with it: deepvm plan --catalog {escape(catalog.name)} --budget 3", soft_wrap=True)
    _print_notes(catalog)


def _print_changes(
    changes: updates.Changes, shown: int | None = _MOVES_SHOWN, since: str = "Since the last update"
) -> None:
    types = f"{len(changes.added):,} types added, {len(changes.removed):,} removed"
    console.print(f"{since}: {len(changes.moves):,} prices changed, {types}.")
    for move in changes.moves[:shown]:
        place = escape(move.zone or move.region)
        amounts = f"{format_usd(move.usd_before)} -> {format_usd(move.usd_after)}"
        console.print(f"  {escape(move.instance)} {move.market} in {place}: {amounts} ({move.ratio - 1:+.0%})")


def _days(catalog: Catalog) -> str:
    seen = catalog.prices_seen
    if seen is None:
        return "never"
    return str(seen[0]) if seen[0] == seen[1] else f"{seen[0]} to {seen[1]}"


def _print_notes(catalog: Catalog) -> None:
    for note in catalog.notes:
        console.print(f"[dim]note: {escape(note)}[/]")
    seen = catalog.prices_seen
    if hint := price_age_note(seen[0], _today(), catalog.provider) if seen else None:
        console.print(f"[yellow]{escape(hint)}[/]")


def _load_or_problem(name: str) -> Catalog | str:
    """Load a catalogue, or return its problem: one broken file must not hide the others."""
    try:
        return library.load(name)
    except DeepvmError as error:
        return str(error)


def _today() -> date:
    return datetime.now(timezone.utc).date()
