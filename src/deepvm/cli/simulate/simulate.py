"""``deepvm simulate``: a plan or a few figures on a market before a cent is spent. Renders ``simulate.backtests``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from deepvm.cli.render import JsonFlag
from deepvm.cli.shared_options import takes
from deepvm.cli.simulate.job_options import Settings, answer, check_figures, job_options, progress
from deepvm.errors import UsageError
from deepvm.simulate import GangJob, backtests, simulate
from deepvm.simulate.strategies import NAMES


@takes(job_options, "job", "settings")
def command(
    job: GangJob,
    settings: Settings,
    traces: Annotated[
        Path | None, typer.Option("--traces", "--trace", help="Replay on this folder of traces instead.")
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="Accelerator of the built-in market [the plan's].")] = None,
    zones: Annotated[int, typer.Option(help="Zones of the built-in market, three to a region.")] = 5,
    days: Annotated[float, typer.Option(help="Length of the built-in market.")] = 30.0,
    compare: Annotated[bool, typer.Option("--compare", help="All strategies side by side.")] = False,
    figure: Annotated[
        list[Path] | None, typer.Option(help="Draw cost and time of each strategy: .svg, .png, .pdf; repeatable.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Replay a job on a spot market before a cent is spent: cost, time and losses over many starts."""
    figures = check_figures(figure)
    strategies = NAMES if compare else ("on-demand", "planned", "oracle")
    planned = settings.planned
    common: dict[str, Any] = {
        "strategies": strategies,
        "spot_usd": planned.spot_usd if settings.spot_usd is None else settings.spot_usd,
        "on_demand_usd": planned.on_demand_usd if settings.on_demand_usd is None else settings.on_demand_usd,
    }
    with progress() as shown:
        if traces is not None:
            result = backtests(
                traces, job, meaning=settings.meaning, fill_budget=settings.fill_budget, progress=shown,
                **common, **settings.replayed,
            )  # fmt: skip
        elif settings.fill_budget:
            raise UsageError(
                "--budget needs --workers, a plan.json or --traces: a drawn market does not set their number"
            )
        else:
            result = simulate(
                job, accelerator=gpu or planned.accelerator, zones=zones, days=days, progress=shown,
                **common, **settings.replayed,
            )  # fmt: skip
    answer(result, as_json=as_json, figures=figures)
