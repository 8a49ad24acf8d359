"""``deepvm simulate``: a plan or a few figures on a market before a cent is spent. Renders ``simulate.backtests``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from deepvm.cli.render import JsonFlag
from deepvm.cli.shared_options import takes
from deepvm.cli.simulate.job_options import Settings, answer, check_figures, job_options, progress
from deepvm.errors import UsageError
from deepvm.simulate import GangJob, backtests, simulate
from deepvm.simulate.strategies import NAMES

FEW = ("on-demand", "planned", "oracle")
ZONES, DAYS = 5, 30.0


@takes(job_options, "job", "settings")
def command(
    job: GangJob,
    settings: Settings,
    traces: Annotated[
        Path | None, typer.Option("--traces", "--trace", help="Replay on this folder of traces instead.")
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="Accelerator of the built-in market [the plan's].")] = None,
    zones: Annotated[
        int | None, typer.Option(help=f"Zones of the built-in market, three to a region [the plan's, else {ZONES}].")
    ] = None,
    days: Annotated[
        float | None, typer.Option(help=f"Length of the built-in market [the plan's, else {DAYS:g}].")
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="All strategies side by side.")] = False,
    figure: Annotated[
        list[Path] | None, typer.Option(help="Draw cost and time of each strategy: .svg, .png, .pdf; repeatable.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Replay a job on a spot market before a cent is spent: cost, time and losses over many starts."""
    figures = check_figures(figure)
    strategies = NAMES if compare else FEW
    planned = settings.planned
    if traces is None and settings.meaning is not None:
        raise UsageError("--meaning has no effect without --traces")
    if planned.conduct and not settings.given.another:
        from deepvm.cli.simulate.own_conduct import replayed  # with the planner

        market = {"--gpu": gpu, "--zones": zones, "--days": days}
        wrong = next((name for name, value in market.items() if value is not None), None)
        if wrong is not None:
            raise UsageError(
                f"{wrong} has no effect on a plan with a market of its own: leave it out, or give --workers"
            )
        if settings.given.waiting:
            raise UsageError(
                "--usd-per-hour-of-waiting has no effect on a plan's own conduct: plan with it, or give --workers"
            )
        with progress() as shown:
            result = replayed(settings, strategies=strategies, traces=traces, progress=shown)
        answer(result, as_json=as_json, figures=figures)
        return
    usd = settings.prices
    common: dict[str, Any] = {
        "strategies": strategies,
        "spot_usd": usd["spot_usd"],
        "on_demand_usd": usd["on_demand_usd"],
    }
    notes = tuple(
        f"planned is chosen every day, and not the plan's conduct, which is of another cluster: {name} is given"
        for name in (settings.given.another[:1] if planned.conduct else ())
    )
    with progress() as shown:
        if traces is not None:
            result = backtests(
                traces, job, meaning=settings.meaning, fill_budget=settings.fill_budget, progress=shown,
                plan_prices=usd["plan_prices"], **common, **settings.replayed,
            )  # fmt: skip
        elif settings.fill_budget:
            raise UsageError(
                "--budget needs --workers, a plan.json or --traces: a drawn market does not set their number"
            )
        else:
            result = simulate(
                job, accelerator=gpu or planned.accelerator, zones=ZONES if zones is None else zones,
                days=DAYS if days is None else days, progress=shown, **common, **settings.replayed,
            )  # fmt: skip
    answer(replace(result, notes=(*notes, *result.notes)), as_json=as_json, figures=figures)
