"""``deepvm backtest``: what every strategy would have paid on recorded markets. Renders ``simulate.backtests``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deepvm.cli.render import JsonFlag
from deepvm.cli.shared_options import takes
from deepvm.cli.simulate.job_options import Settings, answer, check_figures, job_options, progress
from deepvm.market import PriceHistory
from deepvm.simulate import GangJob, backtests
from deepvm.simulate.strategies import NAMES


@takes(job_options, "job", "settings")
def command(
    job: GangJob,
    settings: Settings,
    traces: Annotated[
        Path, typer.Option("--traces", "--trace", help="A folder of traces; each folder with JSON files is a market.")
    ],
    prices: Annotated[
        Path | None, typer.Option(help="A price history (CSV), for traces without prices; on-demand prices too.")
    ] = None,
    strategy: Annotated[list[str] | None, typer.Option(help="Only these strategies, repeatable [all].")] = None,
    figure: Annotated[
        list[Path] | None, typer.Option(help="Draw cost and time of each strategy: .svg, .png, .pdf; repeatable.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Replay a job on recorded spot markets: what every strategy would have paid, for every start."""
    figures, usd = check_figures(figure), settings.prices
    if prices is not None:
        usd["spot_usd"] = settings.spot_usd  # a plan's is older than the file's
    with progress() as shown:
        result = backtests(
            traces,
            job,
            meaning=settings.meaning,
            prices=None if prices is None else PriceHistory.read(prices),
            fill_budget=settings.fill_budget,
            strategies=tuple(strategy or NAMES),
            progress=shown,
            **usd,
            **settings.replayed,
        )
    answer(result, as_json=as_json, figures=figures)
