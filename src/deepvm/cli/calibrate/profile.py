"""``deepvm profile``: parse, call ``calibrate.job``, show the job."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from deepvm.calibrate.job import profile_model, profile_script
from deepvm.calibrate.job.script import DEFAULT_STEPS, DEFAULT_WARMUP, ScriptFailed
from deepvm.cli.render import JsonFlag, console, print_json, safe, stderr, table
from deepvm.errors import UsageError
from deepvm.performance.job import Job
from deepvm.units import format_bytes, format_seconds, parse_seconds

_SCRIPT, _MODEL = "A script", "A model instead of a script"


def command(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="-- SCRIPT ARGS", help="A training script, or -m and a module.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the job to a JSON file, for deepvm plan --job.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, rich_help_panel=_SCRIPT, help="Steps to time [10].")] = None,
    warmup: Annotated[int | None, typer.Option(min=1, rich_help_panel=_SCRIPT, help="Steps before these [3].")] = None,
    timeout: Annotated[str | None, typer.Option(rich_help_panel=_SCRIPT, help="End the script then [10min].")] = None,
    model: Annotated[
        str | None, typer.Option(rich_help_panel=_MODEL, help="A built-in model (gpt2), or a transformers config.json.")
    ] = None,
    precision: Annotated[str | None, typer.Option(rich_help_panel=_MODEL, help="fp32, bf16, fp16 [fp32].")] = None,
    batch: Annotated[
        int | None, typer.Option(rich_help_panel=_MODEL, help="Samples in a step on one GPU [the model's own].")
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option(rich_help_panel=_MODEL, help="adamw, sgd, adafactor [adamw].")
    ] = None,
    parallel: Annotated[str | None, typer.Option(help="How several GPUs train it: ddp, fsdp [ddp].")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure a training job, or compute that of a model, for deepvm plan --job."""
    given: dict[str, Any] = {"precision": precision, "batch": batch, "optimizer": optimizer}
    of_model = {name: value for name, value in given.items() if value is not None}
    of_script = {
        name for name, value in (("steps", steps), ("warmup", warmup), ("timeout", timeout)) if value is not None
    }
    if (model is None) == (not words):
        raise UsageError("give a script or a model: deepvm profile -- train.py ARGS, or deepvm profile --model gpt2")
    useless = sorted(of_model if model is None else of_script)
    if useless:
        kind = "a script, which decides it itself" if model is None else "--model, which nothing runs"
        raise UsageError(f"--{useless[0]} has no effect on {kind}")
    _check_output(output)
    if model is not None:
        with stderr.status("counting"):
            job = profile_model(model, **of_model, parallel=cast(Any, parallel or "ddp"))
    else:
        job = _profile_script(
            words or [],
            steps=steps or DEFAULT_STEPS,
            warmup=warmup or DEFAULT_WARMUP,
            timeout_s=parse_seconds(timeout or "10min"),
            parallel=parallel,
        )
    if output is not None:
        job.write(output)
    if as_json:
        print_json(job.to_json())
        return
    _show(job)
    if output is not None:
        console.print(
            escape(f"\nwritten to {output}: deepvm plan --budget 3 --job {output}"), style="dim", soft_wrap=True
        )


def _check_output(output: Path | None) -> None:
    """Refuse a file that cannot be written before minutes are spent on it."""
    if output is not None and (output.is_dir() or not output.absolute().parent.is_dir()):
        what = "is a folder" if output.is_dir() else "is in a folder that does not exist"
        raise UsageError(f"{output} {what}: name a file, as -o job.json")


def _profile_script(words: list[str], **how: Any) -> Job:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=stderr, transient=True) as bar:
            task = bar.add_task("training steps", total=None)
            return profile_script(
                words, progress=lambda done, total: bar.update(task, completed=done, total=total), **how
            )
    except ScriptFailed as failed:
        if failed.output:
            stderr.print("[dim]the end of its output:[/]")
            for line in failed.output:
                stderr.print(f"  {safe(line)}", style="dim", soft_wrap=True)
        raise


def _show(job: Job) -> None:
    rows = table(None, "", ">", "")
    rows.show_header = False
    for name, value, origin in _rows(job):
        rows.add_row(safe(name), safe(value), safe(origin))
    console.print(f"[bold]{safe(job.name)}[/]")
    console.print(rows)
    for note in job.notes:
        console.print(safe(note), style="dim", soft_wrap=True)


def _rows(job: Job) -> list[tuple[str, str, str]]:
    origin = {name: str(kind) for name, kind in job.origins.items()}
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in job.memory_parts.items())
    saved = ", ".join(f"{name} {format_bytes(part.bytes)}" for name, part in job.components.items())
    changed = [part.changed_bytes for part in job.components.values()]
    rows = [
        ("parameters", f"{job.parameters:,}", "" if job.parameters == job.trainable_parameters else
         f"{job.trainable_parameters:,} of them are trained"),
        ("checkpoint", format_bytes(job.checkpoint_bytes), f"{origin.get('components', '')}: {saved}"),
    ]  # fmt: skip
    if all(size is not None for size in changed):
        rows.append(("of it changes", format_bytes(sum(size or 0 for size in changed)), "from step to step"))
    rows.append(("gradients", format_bytes(job.gradient_bytes), origin.get("gradient_bytes", "")))
    if job.step_s is not None:
        batch = "" if job.batch is None else f", with a batch of {job.batch}"
        ends = f"{format_seconds(job.step_s.quantile_s(0.05))} to {format_seconds(job.step_s.quantile_s(0.95))}"
        spread = f"{ends} (5 to 95 %) in {len(job.step_s.seconds)} steps{batch}"
        rows.append(("step", format_seconds(job.step_s.median_s), f"measured: {spread}"))
    elif job.batch is not None:
        rows.append(("batch", f"{job.batch:,}", "for one GPU"))
    if job.data_share is not None:
        rows.append(("waits for data", f"{job.data_share:.1%}", "of a step"))
    if job.flops_per_step is not None:
        speed = job.achieved_flops_per_s
        rate = "" if speed is None else f", {_scaled(speed)}FLOP/s"
        rows.append(("FLOPs", _scaled(job.flops_per_step), f"{origin.get('flops_per_step', '')}: of a step{rate}"))
    if job.memory_bytes is not None:
        rows.append(("GPU memory", format_bytes(job.memory_bytes), f"{origin.get('memory_bytes', '')}: {parts}"))
    if job.host_memory_bytes is not None:
        rows.append(("peak memory", format_bytes(job.host_memory_bytes), "of the process"))
    rows.append(("precision", job.precision, job.parallel))
    return rows


def _scaled(value: float) -> str:
    """Format with a prefix: 1.23 T, 45.6 G."""
    for power, letter in ((15, "P"), (12, "T"), (9, "G"), (6, "M")):
        if math.fabs(value) >= 10**power:
            return f"{value / 10**power:.3g} {letter}"
    return f"{value:,.0f} "
