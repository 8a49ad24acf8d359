"""The options that ``simulate`` and ``backtest`` share: words of the command line in, a job and settings out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from deepvm.cli.render import print_json, stderr
from deepvm.cli.simulate.shown import show
from deepvm.errors import UsageError
from deepvm.performance.job import read_job
from deepvm.performance.profile import Profile, read_profile
from deepvm.simulate import Backtests, GangJob
from deepvm.simulate.inputs.measured_rates import measured_rates
from deepvm.simulate.inputs.planned_cluster import Machines, machines_of
from deepvm.units import parse_bytes, parse_seconds, parse_usd

DEFAULT_WORKERS, DEFAULT_WORK_H, DEFAULT_BYTES = 8, 24.0, 6_000_000_000


@dataclass(frozen=True, kw_only=True)
class Given:
    """Options as they were given; None where they were not."""

    another: tuple[str, ...]  # those that ask for another cluster than the plan's
    work_h: float | None
    deadline_h: float | None
    starts: int | None
    seed: int | None
    notices: float | None
    notice_s: float | None
    waiting: bool  # what an hour of it is worth
    profiles: tuple[Profile, ...]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What both commands hand on."""

    plan: Path | None
    planned: Machines
    given: Given
    fill_budget: bool  # the number of machines is what the budget pays
    meaning: str | None
    spot_usd: float | None
    on_demand_usd: float | None
    replayed: dict[str, Any]  # arguments of deepvm.simulate.backtest

    @property
    def prices(self) -> dict[str, Any]:
        """Return the prices that are given, else the plan's, and which of them are the plan's."""
        given = {"spot": self.spot_usd, "on-demand": self.on_demand_usd}
        own = {"spot": self.planned.spot_usd, "on-demand": self.planned.on_demand_usd}
        found = {side: own[side] if usd is None else usd for side, usd in given.items()}
        of_plan = tuple(side for side, usd in given.items() if usd is None and own[side] is not None)
        return {"spot_usd": found["spot"], "on_demand_usd": found["on-demand"], "plan_prices": of_plan}


def job_options(
    plan: Annotated[Path | None, typer.Argument(help="A plan of deepvm plan -o: machines, work, prices.")] = None,
    workers: Annotated[int | None, typer.Option(help="Machines that train together [the plan's, else 8].")] = None,
    work: Annotated[
        str | None, typer.Option(help="Undisturbed training time of the machines [the plan's, else 24h].")
    ] = None,
    checkpoint_size: Annotated[
        str | None, typer.Option(help="Bytes of one checkpoint [the job's, the plan's, else 6GB].")
    ] = None,
    job: Annotated[Path | None, typer.Option(help="A file of deepvm profile: the size of checkpoints.")] = None,
    profile: Annotated[
        list[Path] | None, typer.Option(help="Overheads that deepvm calibrate or deepvm run measured, repeatable.")
    ] = None,
    deadline: Annotated[str | None, typer.Option(help="Finish within this time of the start [the plan's].")] = None,
    budget: Annotated[
        str | None, typer.Option(help="Most that the gang may cost an hour; without --workers, it sets their number.")
    ] = None,
    usd_per_hour_of_waiting: Annotated[
        str | None, typer.Option(help="What an hour until the end is worth [0].")
    ] = None,
    confidence: Annotated[float, typer.Option(help="Of what is promised: 0.95 means 19 of 20.")] = 0.95,
    meaning: Annotated[str | None, typer.Option(help="What the traces count: up or preempted.")] = None,
    spot_price: Annotated[
        str | None, typer.Option(help="USD an hour of one spot machine, for traces without prices [the plan's].")
    ] = None,
    on_demand_price: Annotated[
        str | None, typer.Option(help="USD an hour of one on-demand machine [the plan's].")
    ] = None,
    notices: Annotated[
        float | None, typer.Option(help="Share of the losses that the cloud announces in time [the plan's, else 0].")
    ] = None,
    notice: Annotated[
        str | None,
        typer.Option(help="Time from a notice to the loss: 120s on AWS, 30s on Google [the plan's cloud's]."),
    ] = None,
    starts: Annotated[
        int | None, typer.Option("--starts", "--runs", help="Starts, over all markets [the plan's, else 300].")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Draws the starts and, without traces, the market [the plan's, else 0].")
    ] = None,
) -> tuple[GangJob, Settings]:
    found = machines_of(plan) if plan is not None else Machines()
    count = workers if workers is not None else found.workers
    if checkpoint_size is not None:
        size = parse_bytes(checkpoint_size)
    elif job is not None:
        size = read_job(job).checkpoint_bytes
    else:
        size = DEFAULT_BYTES if found.checkpoint_bytes is None else found.checkpoint_bytes
    budget_usd = None if budget is None else parse_usd(budget)
    profiles = tuple(read_profile(path) for path in profile or ())
    notice_s = None if notice is None else parse_seconds(notice)
    if notice_s is not None and notices is None and not found.notices:
        raise UsageError("--notice has no effect without --notices, the share of the losses that are announced")
    asked = {
        "--workers": workers, "--checkpoint-size": checkpoint_size, "--job": job, "--budget": budget
    }  # fmt: skip
    made = GangJob(
        work_h=(found.work_h or DEFAULT_WORK_H) if work is None else parse_seconds(work) / 3600,
        machines=DEFAULT_WORKERS if count is None else count,
        checkpoint_bytes=size,
        deadline_h=found.deadline_h if deadline is None else parse_seconds(deadline) / 3600,
        usd_per_hour_of_waiting=parse_usd(usd_per_hour_of_waiting or "0"),
    )
    share = found.notices if notices is None else notices
    told_s = found.notice_s if notice_s is None else notice_s
    if share and told_s is None:
        raise UsageError("--notices needs --notice, the time from a notice to the loss: 120s on AWS, 30s on Google")
    return made, Settings(
        plan=plan,
        planned=found,
        given=Given(
            another=tuple(name for name, value in asked.items() if value is not None),
            work_h=None if work is None else made.work_h,
            deadline_h=None if deadline is None else made.deadline_h,
            starts=starts,
            seed=seed,
            notices=notices,
            notice_s=notice_s,
            waiting=usd_per_hour_of_waiting is not None,
            profiles=profiles,
        ),
        fill_budget=budget_usd is not None and count is None,
        meaning=meaning,
        spot_usd=None if spot_price is None else parse_usd(spot_price),
        on_demand_usd=None if on_demand_price is None else parse_usd(on_demand_price),
        replayed={
            "budget_usd": budget_usd,
            "rates": replace(measured_rates(profiles, size), notices=share, notice_s=told_s or 0.0),
            "confidence": confidence,
            "starts": 300 if starts is None else starts,
            "seed": 0 if seed is None else seed,
        },
    )


@contextmanager
def progress() -> Iterator[Any]:
    """Show what is replayed, on stderr."""
    with stderr.status("replaying") as status:
        yield lambda what, done, every: status.update(f"replaying {what} ({done} of {every})")


def check_figures(figures: list[Path] | None) -> tuple[Path, ...]:
    """Raise before any work if a figure cannot be drawn."""
    if figures:
        from deepvm.drawing.canvas import check_paths

        check_paths(figures)
    return tuple(figures or ())


def answer(result: Backtests, *, as_json: bool, figures: tuple[Path, ...]) -> None:
    """Print a result, and draw it."""
    if figures:
        from deepvm.simulate.backtesting.figure import draw_backtests

        draw_backtests(result, figures)
    if as_json:
        print_json(result.to_json())
        return
    show(result)
    for path in figures:
        stderr.print(f"written to {path}")
