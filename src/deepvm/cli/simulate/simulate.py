"""``deepvm simulate``: a plan or a few figures on a market before a cent is spent. Renders ``simulate.backtest``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deepvm.cli.render import JsonFlag, print_json, stderr
from deepvm.cli.simulate.shown import show
from deepvm.errors import UsageError
from deepvm.units import parse_bytes, parse_seconds, parse_usd


def command(
    plan: Annotated[Path | None, typer.Argument(help="A plan of deepvm plan -o: its machines and prices.")] = None,
    work: Annotated[str, typer.Option(help="Undisturbed training time of the machines.")] = "24h",
    deadline: Annotated[str | None, typer.Option(help="Finish within this time of the start.")] = None,
    workers: Annotated[int | None, typer.Option(help="Machines that train together [the plan's].")] = None,
    checkpoint_size: Annotated[str | None, typer.Option(help="Bytes of one checkpoint [the plan's].")] = None,
    gpu: Annotated[str | None, typer.Option(help="Accelerator of the built-in market [the plan's].")] = None,
    spot_price: Annotated[str | None, typer.Option(help="USD an hour of one spot machine [the plan's].")] = None,
    on_demand_price: Annotated[str | None, typer.Option(help="USD an hour on demand [the plan's].")] = None,
    zones: Annotated[int, typer.Option(help="Zones of the built-in market, three to a region.")] = 5,
    days: Annotated[float, typer.Option(help="Length of the built-in market.")] = 30.0,
    trace: Annotated[Path | None, typer.Option(help="Replay on this folder of traces instead.")] = None,
    meaning: Annotated[str | None, typer.Option(help="What the traces count: up or preempted.")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="All strategies side by side.")] = False,
    confidence: Annotated[float, typer.Option(help="Of what is promised: 0.95 means 19 of 20.")] = 0.95,
    runs: Annotated[int, typer.Option(help="Starts.")] = 300,
    seed: Annotated[int, typer.Option(help="Draws the market and the starts.")] = 0,
    as_json: JsonFlag = False,
) -> None:
    """Replay a job on a spot market before a cent is spent: cost, time and losses over many starts."""
    from deepvm.simulate.backtest import backtests, simulate
    from deepvm.simulate.job import GangJob
    from deepvm.simulate.planned_cluster import Machines, machines_of
    from deepvm.simulate.strategies import NAMES

    found = machines_of(plan) if plan is not None else Machines()
    count, size = workers or found.workers, found.checkpoint_bytes
    if checkpoint_size is not None:
        size = parse_bytes(checkpoint_size)
    spot = found.spot_usd if spot_price is None else parse_usd(spot_price)
    on_demand = found.on_demand_usd if on_demand_price is None else parse_usd(on_demand_price)
    if count is None:
        raise UsageError("the number of machines is missing: give a plan.json, or --workers")
    job = GangJob(
        work_h=parse_seconds(work) / 3600,
        machines=count,
        checkpoint_bytes=6_000_000_000 if size is None else size,
        deadline_h=None if deadline is None else parse_seconds(deadline) / 3600,
    )
    strategies = NAMES if compare else ("on-demand", "planned", "oracle")
    with stderr.status("replaying"):
        if trace is not None:
            result = backtests(
                trace, job, meaning=meaning, strategies=strategies, starts=runs, seed=seed, confidence=confidence,
                spot_usd=spot, on_demand_usd=on_demand,
            )  # fmt: skip
        else:
            result = simulate(
                job, accelerator=gpu or found.accelerator, zones=zones, days=days, spot_usd=spot,
                on_demand_usd=on_demand, strategies=strategies, starts=runs, seed=seed, confidence=confidence,
            )  # fmt: skip
    if as_json:
        print_json(result.to_json())
    else:
        show(result)
