"""``deepvm calibrate network`` and ``deepvm calibrate overheads``: parse, call one function, render."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepvm.cli.calibrate.session import (
    Figure,
    Output,
    check_figure,
    measuring,
    parse_counts,
    show_files,
    show_kept,
)
from deepvm.cli.render import JsonFlag, console, print_json, stderr, table
from deepvm.units import format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:
    from deepvm.calibrate.network import NetworkCalibration
    from deepvm.calibrate.overheads import OverheadCalibration


def register(app: typer.Typer) -> None:
    """Add both commands to ``deepvm calibrate``."""
    app.command("network")(network)
    app.command("overheads")(overheads)


def network(
    workers: Annotated[str, typer.Option("--workers", help="Numbers of workers: 1,2,4 or 1..4.")] = "1,2,4",
    memory_nodes: Annotated[str, typer.Option("--memory-nodes", help="Numbers of memory nodes.")] = "1..4",
    links: Annotated[str, typer.Option("--links", help="Rates of every machine's link, in Gbit/s.")] = "1,5,10,25",
    checkpoint_size: Annotated[str, typer.Option("--checkpoint-size", help="Bytes of each worker's checkpoint.")] = (
        "64MB"
    ),
    repeats: Annotated[int, typer.Option("--repeats", help="Saves of each combination.")] = 5,
    output: Output = None,
    figure: Figure = None,
    as_json: JsonFlag = False,
) -> None:
    """Send checkpoints of n workers to m memory nodes, and find from where on the network is saturated."""
    from deepvm.calibrate.network import NetworkSettings, calibrate_network
    from deepvm.calibrate.network.settings import no_links_because, parse_rates

    settings = NetworkSettings(
        workers=parse_counts(workers, "--workers"),
        memory_nodes=parse_counts(memory_nodes, "--memory-nodes"),
        links_gbps=parse_rates(links),
        checkpoint_bytes=parse_bytes(checkpoint_size),
        repeats=repeats,
    )
    check_figure(figure)
    if (because := no_links_because()) is not None:
        stderr.print(f"{because}: all links are loopback without a limit, and --links is ignored", soft_wrap=True)
    with measuring(output) as progress:
        found = calibrate_network(settings, output, progress=progress)
    if figure is not None:
        from deepvm.calibrate.network.figure import draw_network

        draw_network(found, [figure])
    if as_json:
        print_json({**found.to_json(), "profile": None if output is None else str(output)})
        return
    _show_network(found)
    show_files(output, figure)


def overheads(
    sizes: Annotated[str, typer.Option("--sizes", help="Sizes of the training state.")] = "10MB,100MB,1GB",
    repeats: Annotated[int, typer.Option("--repeats", help="Preemptions at each size.")] = 3,
    output: Output = None,
    figure: Figure = None,
    as_json: JsonFlag = False,
) -> None:
    """Run small jobs that lose a machine, and measure what saves and recoveries cost by the size of the state."""
    from deepvm.calibrate.overheads import OverheadSettings, calibrate_overheads
    from deepvm.calibrate.overheads.settings import parse_sizes

    settings = OverheadSettings(sizes=parse_sizes(sizes), repeats=repeats)
    check_figure(figure)
    with measuring(output) as progress:
        found = calibrate_overheads(settings, output, progress=progress)
    if figure is not None:
        from deepvm.calibrate.overheads.figure import draw_overheads

        draw_overheads(found, [figure])
    if as_json:
        print_json({**found.to_json(), "profile": None if output is None else str(output)})
        return
    _show_overheads(found)
    show_files(output, figure)


def _show_network(found: NetworkCalibration) -> None:
    rows = table(
        "Time until all checkpoints are remote",
        ">link", ">workers", ">memory nodes", ">seconds", ">spread", ">fitted", "bound by", ">a step beside it",
    )  # fmt: skip
    for point in sorted(found.points, key=lambda p: (p.link_gbps or math.inf, p.workers, p.memory_nodes)):
        model = None if found.fit is None else found.fit.model
        rows.add_row(
            "-" if point.link_gbps is None else f"{point.link_gbps:g} Gbit/s",
            str(point.workers),
            str(point.memory_nodes),
            format_seconds(point.remote_s.median_s),
            f"{point.remote_s.spread:.0%}",
            "-" if model is None else format_seconds(model.predicted_s(point)),
            "-" if model is None else model.bound_by(point),
            "-" if point.step_s is None else format_seconds(point.step_s.median_s),
        )
    console.print(rows)
    console.print()
    for each in found.saturation:
        console.print(str(each), soft_wrap=True)
    if found.fit is not None:
        console.print(_fit_text(found.fit), style="dim", soft_wrap=True)
    show_kept(len(found.points) - found.measured, len(found.points))


def _fit_text(fit: Any) -> str:
    model = fit.model
    host = "" if model.host_bytes_per_s == math.inf else f", this host {format_bytes(model.host_bytes_per_s)}/s"
    held = "" if fit.held_out_error is None else f", {fit.held_out_error:.0%} for points left out"
    return (
        f"model: latency {format_seconds(model.latency_s)}, {model.usable_share:.0%} of a link's rate, "
        f"penalty {model.penalty:.2f}{host}; mean error {fit.mean_relative_error:.0%}, "
        f"worst {fit.worst_relative_error:.0%}{held}"
    )


def _show_overheads(found: OverheadCalibration) -> None:
    sizes = sorted({point.state_bytes for point in found.points})
    rows = table("Overheads by size of the state", "what", *(f">{format_bytes(size)}" for size in sizes))
    for name in dict.fromkeys(point.name for point in found.points):
        cells = {p.state_bytes: p.seconds for p in found.points if p.name == name}
        texts = [
            f"{format_seconds(cells[size].median_s)} (n={len(cells[size].seconds)})" if size in cells else "-"
            for size in sizes
        ]
        rows.add_row(name.replace("_", " "), *texts)
    console.print(rows)
    show_kept(found.kept, len(sizes), "sizes")
