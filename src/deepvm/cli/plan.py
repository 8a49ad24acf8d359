"""``deepvm plan``: parse a request, call the planner, show its four stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import date, datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.markup import escape
from rich.text import Text

from deepvm import plan as planning
from deepvm.catalog import Catalog
from deepvm.catalog.library import STANDS_IN
from deepvm.cli.options import takes_request
from deepvm.cli.render import JsonFlag, LateBar, console, json_text, price_age_note, print_json, table, write_text
from deepvm.cli.risk import shown
from deepvm.errors import UsageError
from deepvm.plan import POLICIES, Explanation, Plan, Recommendation, Request
from deepvm.plan.explain import Figure
from deepvm.plan.objectives import unit
from deepvm.plan.profiles import Ratings
from deepvm.plan.result import RestoreForecast
from deepvm.units import format_bytes, format_count, format_days, format_seconds, format_usd, parse_usd

if TYPE_CHECKING:
    from deepvm.market.trace import Trace

_ROWS_OF_INSTANCES = 6


def _risk(help_text: str, *names: str) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel="The spot market")


@takes_request
def command(
    *,
    budget: Annotated[str, typer.Option(help="Dollars an hour for the whole cluster.")],
    top: Annotated[int, typer.Option(help="How many plans to recommend.")] = 3,
    policy: Annotated[str, typer.Option(help=f"Who chooses: {', '.join(POLICIES)}.")] = "deepvm",
    explain: Annotated[bool, typer.Option("--explain", help="Why this one, and what would change it.")] = False,
    pareto: Annotated[bool, typer.Option("--pareto", help="The front of price against performance.")] = False,
    mixed: Annotated[bool, typer.Option("--mixed", help="Allow several GPU types in one cluster.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the plan to a JSON file.")] = None,
    as_json: JsonFlag = False,
    confidence: Annotated[float | None, _risk("Of keeping --deadline: 0.95 means 19 of 20 [0.95].")] = None,
    usd_per_hour_of_waiting: Annotated[str, _risk("What an hour until the end is worth, for --objective cost.")] = "0",
    spot_market: Annotated[
        str, _risk("built-in, or none: spot machines stay [built-in with --work].", "--market")
    ] = "auto",
    traces: Annotated[Path | None, _risk("A folder of recorded capacity, instead of the built-in market.")] = None,
    meaning: Annotated[str | None, _risk("What the traces count: up or preempted.")] = None,
    risk: Annotated[bool, _risk("Draw how cost and time of the first plan are distributed.", "--risk")] = False,
    figure: Annotated[Path | None, _risk("Draw that into a file (.svg, .png, .pdf).")] = None,
    notices: Annotated[float | None, _risk("Share of the losses that the cloud announces in time [0].")] = None,
    seed: Annotated[int | None, _risk("Draws the built-in market [0].")] = None,
    catalog: Catalog,
    request: Request,
) -> None:
    """Plan the best cluster for a budget out of spot and on-demand machines."""
    if confidence is not None and request.deadline_s is None:
        raise UsageError("--confidence has no effect without --deadline")
    request = replace(
        request, budget_usd=parse_usd(budget), top=top, policy=policy, mixed=mixed,
        confidence=0.95 if confidence is None else confidence, market=cast(Any, spot_market), seed=seed or 0,
        notices=notices or 0.0, usd_per_hour_of_waiting=parse_usd(usd_per_hour_of_waiting),
    )  # fmt: skip
    of_market = {"risk": risk or None, "figure": figure, "confidence": confidence, "notices": notices, "seed": seed}
    given = next((name for name, value in of_market.items() if value is not None), None)
    if given is not None and not request.under_market(catalog):
        raise UsageError(f"--{given} needs a spot market: {_no_market(request)}")
    recorded = _traces(traces, meaning)
    today = _today()
    with LateBar("searching") as bar:  # mixed clusters and explanations over a whole cloud take seconds
        plan = planning.plan(catalog, request, traces=recorded, progress=bar)
        front = planning.pareto(catalog, request) if pareto else None
        reasons = planning.explain(catalog, plan, today) if explain else None

    document = plan.to_json()
    if front is not None:
        document["pareto"] = [r.to_json() for r in front]
    if reasons is not None:
        document["explanation"] = reasons.to_json()
    expected = plan.recommendations[0].expected
    if risk and expected is not None:
        document["risk"] = expected.risk.distribution()
    deadline_h = None if request.deadline_s is None else request.deadline_s / 3600
    if figure is not None and expected is not None:
        from deepvm.cli.risk.figure import draw_risk

        draw_risk(expected, figure, title=cluster_text(plan.recommendations[0]), deadline_h=deadline_h)
    if output is not None:
        write_text(output, json_text(document) + "\n")
    if as_json:
        print_json(document)
        return
    _show(plan, today, catalog.provider)
    if risk and expected is not None:
        shown.show_distribution(expected, deadline_h)
    if front is not None:
        _show_front(front)
    if reasons is not None:
        _show_reasons(plan, reasons)
    for path in (output, figure):
        if path is not None:
            console.print(escape(f"\nwritten to {path}"), style="dim", soft_wrap=True)


def _no_market(request: Request) -> str:
    """Say why a request has no spot market, and what gives it one."""
    if request.work_eflops_h is None:
        return "give --work"
    if request.published:
        return f"the paper's objective {request.objective} has none, choose throughput, cost or time"
    if request.policy != "deepvm":
        return f"policy {request.policy} has none, leave it out"
    if request.mixed:
        return "--mixed has none, leave it out"
    return "leave --market none out" if request.market == "none" else "the paper's catalogues need --market built-in"


def _today() -> date:
    return datetime.now(timezone.utc).date()


def _traces(folder: Path | None, meaning: str | None) -> dict[str, tuple[Trace, ...]] | None:
    if folder is None:
        if meaning is not None:
            raise UsageError("--meaning has no effect without --traces")
        return None
    from deepvm.market.trace import load_traces  # few plans have traces

    return load_traces(folder, meaning=meaning)


def _show(plan: Plan, today: date, provider: str) -> None:
    request = plan.request
    console.print(
        f"[bold]1 Request[/]  {format_usd(request.budget_usd)}/h from {escape(plan.catalog)}, "
        f"by {request.objective}, policy {request.policy}\n"
    )
    _show_instances(plan)
    _show_architectures(plan)
    _show_decision(plan)
    oldest = min(role.seen for r in plan.recommendations for role in r.roles)
    best = plan.recommendations[0]
    console.print()
    console.print(f"prices of {oldest.isoformat()}; network by the {best.network}", style="dim")
    if best.traffic_usd_per_hour:
        console.print(f"traffic between zones: {format_usd(best.traffic_usd_per_hour)}/h of the price", style="dim")
    if best.estimates:
        console.print(escape(f"estimated, not measured: {', '.join(best.estimates)}"), style="dim")
    if request.ratings is not None:
        console.print(escape(_rated(request.ratings, under_market=best.expected is not None)), style="dim")
    if STANDS_IN in plan.notes:
        console.print(escape(STANDS_IN), style="yellow")
    hint = price_age_note(oldest, today, best.worker.cloud or provider)
    if hint:
        console.print(hint, style="yellow")


def _rated(ratings: Ratings, *, under_market: bool) -> str:
    if not ratings.machines and ratings.roofline is None:
        only = "say only what starts, saves and restores take" if under_market else "only forecast restores"
        return "; ".join([f"the profiles {only}", *ratings.notes])
    measured = ", ".join(ratings.machines) or "no machine of this catalogue"
    return "; ".join([f"measured with {ratings.workload}: {measured}", *ratings.notes])


def _show_instances(plan: Plan) -> None:
    title = f"2 Instances  {format_count(len(plan.instances), 'GPU type')}; most eFLOPS for a dollar first"
    rows = table(title, "type", "GPU", ">eFLOPS", ">spot $/h", ">FLOPP spot", ">on-demand")
    for row in plan.instances[:_ROWS_OF_INSTANCES]:
        rows.add_row(
            escape(row.instance),
            escape(row.accelerator),
            f"{'~' if row.eflops_estimated else ''}{row.eflops:,.0f}",
            "-" if row.spot_usd is None else f"{row.spot_usd:.4f}",
            "-" if row.spot_flopp is None else f"{row.spot_flopp:,.0f}",
            "-" if row.on_demand_flopp is None else f"{row.on_demand_flopp:,.0f}",
        )
    console.print(rows)
    if plan.left_out:
        out = "; ".join(f"{x.count} {x.reason}" for x in plan.left_out[:4])
        console.print(escape(f"left out: {out}"), style="dim")
    console.print()


def _show_architectures(plan: Plan) -> None:
    title = "3 Architectures  the best of each within the budget"
    rows = table(title, "architecture", "cluster", ">$/h", ">performance")
    for best in plan.architectures:
        figures = (f"{best.hourly_usd:.4f}", f"{best.performance:,.1f}")
        rows.add_row(best.architecture, escape(cluster_text(best)), *figures)
    console.print(rows)
    console.print()


def _show_decision(plan: Plan) -> None:
    objective = plan.request.objective
    under_market = plan.recommendations[0].expected is not None
    rows = table("4 Decision", ">#", "cluster", "where", ">$/h")
    if objective == "throughput" or not under_market:
        rows.add_column("performance", justify="right")
    if under_market:
        shown.columns(rows)
    elif objective != "throughput":
        rows.add_column(f"{objective} ({unit(objective)})", justify="right")
    for best in plan.recommendations:
        cells: list[str | Text] = [
            str(best.rank),
            Text(cluster_text(best), style="bold green" if best.rank == 1 else ""),
            escape(best.worker.place),
            f"{best.hourly_usd:.4f}",
            *([f"{best.performance:,.1f}"] if objective == "throughput" or not under_market else []),
        ]
        if best.expected is not None:
            cells += shown.cells(best.expected)
        elif objective != "throughput":
            cells.append(f"{best.objective_value:,.2f}")
        rows.add_row(*cells)
    console.print(rows)
    if under_market:
        shown.show_conduct(plan.recommendations[0], plan.failover, plan.advice)


def cluster_text(best: Recommendation) -> str:
    """Format a cluster: ``17 × g4dn.xlarge spot + 1 × c5.xlarge on-demand (memory)``."""
    return " + ".join(
        f"{role.count} × {role.instance} {role.market}" + ("" if role.role == "worker" else f" ({role.role})")
        for role in best.roles
    )


def restore_text(restore: RestoreForecast) -> str:
    """Format a forecast: ``about 5.2 s after a loss, 4.1 s of it fetch 17 × 300 MB, bound by ...``."""
    time = restore.time
    fetch = f"{format_seconds(time.fetch_s)} of it fetch {restore.workers} × {format_bytes(restore.state_bytes)}"
    measured = f"; measured: {', '.join(restore.measured).replace('_', ' ')}" if restore.measured else ""
    return (
        f"about {format_seconds(time.total_s)} after a loss, {fetch}, bound by {time.bound_by}; "
        f"{format_seconds(restore.on_demand_s)} overlapped and on demand{measured}"
    )


def _show_front(front: tuple[Recommendation, ...]) -> None:
    rows = table("\nPareto front  nothing is both cheaper and faster", ">$/h", ">performance", "cluster")
    for best in front:
        rows.add_row(f"{best.hourly_usd:.4f}", f"{best.performance:,.1f}", escape(cluster_text(best)))
    console.print(rows)


def _show_reasons(plan: Plan, why: Explanation) -> None:
    rows = table("\nExplanation")
    rows.show_header = False
    rows.add_column(style="cyan", no_wrap=True)
    rows.add_column(overflow="fold")
    for name, text in _reasons(plan, why):
        rows.add_row(name, escape(text))
    console.print(rows)


def rating_rows(ratings: Ratings) -> Iterator[tuple[str, str]]:
    """Name what profiles measured, and how well they predict machines that they did not."""
    for one in ratings.machines.values():
        speed = "no eFLOPS" if one.eflops is None else f"{one.eflops:,.0f} eFLOPS"
        curve = ""
        if one.curve is not None:
            tested = "untested" if one.curve_error is None else f"{one.curve_error:.1%} off where it was tested"
            curve = f", scaling by {one.curve_name} ({tested})"
        yield "measured", f"{one.instance}: {speed} for {ratings.workload}{curve}, {one.date[:10]}"
    if ratings.roofline is not None:
        worst, usual = ratings.roofline.worst_error or 0.0, ratings.roofline.error or 0.0
        types = ", ".join(ratings.roofline.devices)
        yield (
            "estimated",
            f"other types by a roofline of {types}: {usual:.0%} off, at worst {worst:.0%}, by leaving one out",
        )
    for note in ratings.notes:
        yield "profile", note


_FIGURES = {
    "checkpoint_bytes": "checkpoint",
    "gradient_bytes": "gradients",
    "step_s": "step on a T4",
    "gpu_memory_bytes": "GPU memory",
}


def _figure_text(figure: Figure) -> str:
    """Format a figure and its origin: ``1.49 GB, measured``."""
    if figure.value is None:
        return f"unknown, {figure.origin}"
    shown = format_seconds(figure.value) if figure.name == "step_s" else format_bytes(figure.value)
    between = ""
    if figure.low is not None and figure.high is not None:
        between = f" (from {format_seconds(figure.low)} to {format_seconds(figure.high)})"
    return f"{shown}{between}, {figure.origin}"


def _reasons(plan: Plan, why: Explanation) -> Iterator[tuple[str, str]]:
    best = plan.recommendations[0]
    yield "why", why.because
    yield "bound by", "; ".join(why.binding)
    yield "unspent", f"{format_usd(why.unspent_usd)}/h of the budget"
    for links in why.links:
        yield "all-reduce", links
    if why.batch is not None:
        yield "batch", why.batch
    for figure in why.figures:
        yield _FIGURES[figure.name], _figure_text(figure)
    if why.runner_up is None:
        yield "runner-up", "no other GPU type fits"
    else:
        price = f"{why.runner_up.hourly_usd:.4f} $/h"
        behind = f"{why.runner_up_behind or 0.0:.1%} behind, the best of another type"
        yield "runner-up", f"{cluster_text(why.runner_up)} at {price}, {behind}"
    if why.dollar_more is not None:
        gained = f"{why.dollar_more_gain or 0.0:+.1%}, with {cluster_text(why.dollar_more)}"
        yield "$1/h more", gained if why.dollar_more_gain else "buys nothing"
    if why.flip_usd is None:
        if why.risk is None:
            yield "flips", "at no price of its worker within the budget"
    else:
        worker = f"{best.worker.instance} {best.worker.market}"
        yield "flips", f"when {worker} costs more than {format_usd(why.flip_usd)}/h"
    if why.quota_raises:
        most = why.quota_raises[0]
        vcpus = f"from {most.vcpus:g} to {most.wanted_vcpus:g} vCPUs"
        yield "quota", f"raising {most.quota} {vcpus} buys {most.gain:+.1%}"
    else:
        yield "quota", "no raise would help"
    if best.restore is not None:
        yield "restore", restore_text(best.restore)
    if why.risk is not None:
        yield from shown.reason_rows(why.risk)
    if best.memory_failure_per_day is not None:
        yield "memory tier", f"one of its machines fails in a day with {best.memory_failure_per_day:.2%}"
    if plan.request.ratings is not None:
        yield from rating_rows(plan.request.ratings)
    for age in why.price_ages:
        yield "price", f"{age.instance} {age.market}: {age.seen.isoformat()}, {format_days(age.days)}"
    for out in plan.left_out:
        yield "left out", f"{out.count} × {out.reason} (as {out.example})"
