"""``deepvm backtest``: what every strategy would have paid on recorded markets. Renders ``simulate.backtest``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deepvm.cli.render import JsonFlag, print_json, stderr
from deepvm.cli.simulate.shown import show
from deepvm.units import parse_bytes, parse_seconds, parse_usd


def command(
    traces: Annotated[Path, typer.Option(help="A folder of traces; each folder in it with JSON files is a market.")],
    meaning: Annotated[str | None, typer.Option(help="What the traces count: up or preempted.")] = None,
    workers: Annotated[int, typer.Option(help="Machines that train together.")] = 8,
    work: Annotated[str, typer.Option(help="Undisturbed training time of these machines.")] = "24h",
    checkpoint_size: Annotated[str, typer.Option(help="Bytes of one checkpoint.")] = "6GB",
    deadline: Annotated[str | None, typer.Option(help="Finish within this time of the start.")] = None,
    usd_per_hour_of_waiting: Annotated[str, typer.Option(help="What an hour until the end is worth.")] = "0",
    confidence: Annotated[float, typer.Option(help="Of what is promised: 0.95 means 19 of 20.")] = 0.95,
    starts: Annotated[int, typer.Option(help="Moments at which the job starts, over all markets.")] = 300,
    seed: Annotated[int, typer.Option(help="Draws the starts.")] = 0,
    strategy: Annotated[list[str] | None, typer.Option(help="Only these strategies, repeatable [all].")] = None,
    spot_price: Annotated[
        str | None, typer.Option(help="USD an hour of one machine, for traces without prices.")
    ] = None,
    on_demand_price: Annotated[str | None, typer.Option(help="USD an hour of one on-demand machine.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Replay a job on recorded spot markets: what every strategy would have paid, for every start."""
    from deepvm.simulate.backtest import backtests
    from deepvm.simulate.job import GangJob
    from deepvm.simulate.strategies import NAMES

    job = GangJob(
        work_h=parse_seconds(work) / 3600,
        machines=workers,
        checkpoint_bytes=parse_bytes(checkpoint_size),
        deadline_h=None if deadline is None else parse_seconds(deadline) / 3600,
        usd_per_hour_of_waiting=parse_usd(usd_per_hour_of_waiting),
    )
    with stderr.status("replaying") as status:
        result = backtests(
            traces,
            job,
            meaning=meaning,
            strategies=tuple(strategy or NAMES),
            starts=starts,
            seed=seed,
            confidence=confidence,
            spot_usd=None if spot_price is None else parse_usd(spot_price),
            on_demand_usd=None if on_demand_price is None else parse_usd(on_demand_price),
            progress=lambda what, done, every: status.update(f"replaying {what} ({done} of {every})"),
        )
    if as_json:
        print_json(result.to_json())
    else:
        show(result)
