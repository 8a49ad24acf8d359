"""``deepvm calibrate compute``, ``scaling`` and ``show``: parse, call one function, render."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from deepvm.cli.calibrate.session import (
    Figure,
    Output,
    check_figure,
    measuring,
    parse_counts,
    show_files,
    show_kept,
)
from deepvm.cli.calibrate.tables import profile_document, show_choice, show_compute, show_profile
from deepvm.cli.render import JsonFlag, print_json, stderr
from deepvm.units import parse_seconds

WORKLOADS = "resnet18, resnet50, efficientnet-v2-m, gpt2, tiny"
Workload = Annotated[str, typer.Option(help=f"What to train: {WORKLOADS}.")]
Precision = Annotated[str, typer.Option(help="fp32, tf32, bf16 or fp16.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")]
Instance = Annotated[str | None, typer.Option(help="The cloud's name of this machine, where it cannot be read.")]
Again = Annotated[bool, typer.Option("--again", help="Measure the points that the file has, too.")]
Repeats = Annotated[int, typer.Option(help="Steps of one point.")]
Seconds = Annotated[str, typer.Option(help="Most time for the warm-up and for the steps of one point.")]


def register(app: typer.Typer) -> None:
    """Add the commands to ``deepvm calibrate``."""
    app.command("compute")(compute)
    app.command("scaling")(scaling)
    app.command("show")(show)


def compute(
    workload: Workload = "resnet18",
    job: Annotated[Path | None, typer.Option(help="A job.json of deepvm profile, instead of --workload.")] = None,
    batch: Annotated[str | None, typer.Option(help="Batch sizes, as 16,32 [by workload and device].")] = None,
    precision: Precision = "fp32",
    device: Device = "auto",
    instance: Instance = None,
    repeats: Repeats = 20,
    seconds: Seconds = "8s",
    again: Again = False,
    output: Output = None,
    figure: Figure = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure the steps of a workload on this machine, and its eFLOPS."""
    from deepvm.calibrate.compute import ComputeSettings, calibrate_compute
    from deepvm.performance.job import read_job

    settings = ComputeSettings(
        workload=workload,
        job=None if job is None else read_job(job),
        batches=parse_counts(batch, "--batch") if batch is not None else (),
        precision=precision,
        device=device,
        instance=instance,
        output=output,
        again=again,
        repeats=repeats,
        limit_s=parse_seconds(seconds),
    )
    check_figure(figure)
    with measuring(output) as progress:
        result = calibrate_compute(settings, progress)
    if figure is not None:
        from deepvm.calibrate.figures import draw_profiles

        draw_profiles([result.profile], figure)
    if as_json:
        print_json(result.to_json())
        return
    show_compute(result.profile, result.ratings)
    points = len(result.profile.compute)
    show_kept(points - result.measured, points)
    show_files(output, figure)


def scaling(
    workers: Annotated[str, typer.Option(help="Numbers of workers, as 1,2,4.")] = "1,2,4",
    workload: Workload = "resnet18",
    batch: Annotated[int | None, typer.Option(help="Samples of each worker in a step [by workload].")] = None,
    precision: Precision = "fp32",
    device: Device = "auto",
    on: Annotated[str, typer.Option("--on", help="Where workers run: local, or ssh:HOST,HOST.")] = "local",
    remote_python: Annotated[
        str, typer.Option(help="The Python of these hosts that has deepvm and torch.")
    ] = "python3",
    cores_per_worker: Annotated[
        int | None, typer.Option(help="Cores of each worker [an equal share of this machine].")
    ] = None,
    most_workers: Annotated[int | None, typer.Option(help="Most workers of the point to measure next.")] = None,
    instance: Instance = None,
    repeats: Repeats = 20,
    seconds: Seconds = "8s",
    again: Again = False,
    output: Output = None,
    figure: Figure = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure data-parallel training with 1, 2, 4 ... workers, and choose the curve that predicts it best."""
    from deepvm.calibrate.scaling import ScalingSettings, calibrate_scaling

    settings = ScalingSettings(
        workers=parse_counts(workers, "--workers"),
        workload=workload,
        batch=batch,
        precision=precision,
        device=device,
        on=on,
        remote_python=remote_python,
        cores_per_worker=cores_per_worker,
        most_workers=most_workers,
        instance=instance,
        output=output,
        again=again,
        repeats=repeats,
        limit_s=parse_seconds(seconds),
    )
    check_figure(figure)
    with measuring(output) as progress:
        result = calibrate_scaling(settings, progress, warn=_warn)
    if figure is not None:
        from deepvm.calibrate.figures import draw_profiles

        draw_profiles([result.profile], figure, choice=result.choice)
    if as_json:
        print_json(result.to_json())
        return
    show_choice(result.profile, result.choice)
    points = len(result.profile.scaling)
    show_kept(points - result.measured, points)
    show_files(output, figure)


def show(
    files: Annotated[list[Path], typer.Argument(help="Profiles; those of one machine and workload merge.")],
    figure: Figure = None,
    as_json: JsonFlag = False,
) -> None:
    """Show profiles: points, fits and bands."""
    from deepvm.performance.profile import merge, read_profile

    profiles = merge([read_profile(path) for path in files])
    if figure is not None:
        from deepvm.calibrate.figures import draw_profiles

        draw_profiles(profiles, figure)
    if as_json:
        print_json({"profiles": [profile_document(profile) for profile in profiles]})
        return
    for profile in profiles:
        show_profile(profile)
    show_files(figure)


def _warn(text: str) -> None:
    stderr.print(escape(text), style="yellow", soft_wrap=True)
