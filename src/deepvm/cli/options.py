"""The options that ``plan`` and ``sweep`` share: words of the command line in, a catalogue and a Request out."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from datetime import date, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.markup import escape

from deepvm import catalog as catalogues
from deepvm.catalog import Catalog, Market, Quota
from deepvm.catalog.joined import joined
from deepvm.catalog.library import DEFAULT
from deepvm.cli.render import stderr
from deepvm.cli.shared_options import takes
from deepvm.errors import UnknownName, UsageError
from deepvm.performance.job import Job, read_job
from deepvm.performance.profile import read_profile
from deepvm.plan import OBJECTIVES, Request
from deepvm.plan.profiles import rate_machines
from deepvm.plan.request import LOSSES_PER_H
from deepvm.plan.search.instances import job_eflops
from deepvm.units import parse_bytes, parse_gpu_gb, parse_seconds


def _job(help_text: str) -> Any:
    return typer.Option(help=help_text, rich_help_panel="The job")


def _cluster(help_text: str, *names: str) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel="What the cluster may be made of")


def _model(help_text: str) -> Any:
    return typer.Option(help=help_text, rich_help_panel="How it is modelled")


def _request_options(
    catalog: Annotated[
        list[str] | None,
        typer.Option("--catalog", help=f"A catalogue's name, or a file; several are one market [{DEFAULT}]."),
    ] = None,
    as_of: Annotated[
        datetime | None,
        typer.Option("--as-of", formats=["%Y-%m-%d"], help="Prices of this day, from the catalogue's history."),
    ] = None,
    price: Annotated[
        str | None,
        typer.Option(help="Prices at a percentile of the last 30 days, as p75, where there is a history [the newest]."),
    ] = None,
    objective: Annotated[str, typer.Option(help=f"What counts as better: {', '.join(OBJECTIVES)}.")] = "throughput",
    job: Annotated[
        Path | None, _job("A file of deepvm profile: sizes, step time and memory that are not given below.")
    ] = None,
    model: Annotated[str | None, _job("The same for a built-in model (gpt2) or a transformers config.json.")] = None,
    precision: Annotated[str | None, _job("Of --model: fp32, bf16, fp16 [fp32].")] = None,
    batch: Annotated[int | None, _job("Samples in a step on one GPU [the model's own].")] = None,
    parallel: Annotated[str | None, _job("Of --job or --model: ddp, fsdp [ddp].")] = None,
    optimizer: Annotated[str | None, _job("Of --model: adamw, sgd, adafactor [adamw].")] = None,
    checkpoint_size: Annotated[str | None, _job("Bytes of one checkpoint [the job's, else 300MB].")] = None,
    buffers: Annotated[int, _job("Checkpoints kept in memory.")] = 2,
    checkpoint_every: Annotated[str, _job("Time between checkpoints.")] = "60s",
    gradient_size: Annotated[
        str | None, _job("Gradients exchanged in a step [the job's, else a third of that].")
    ] = None,
    step_time: Annotated[str | None, _job("Compute of one step on one T4 [the job's, else 0.5s].")] = None,
    global_batch: Annotated[int | None, _job("Most samples in a step over all GPUs [what fills them].")] = None,
    work: Annotated[str | None, _job("The whole job: 40h@g4dn.xlarge, or a number of eFLOPS hours.")] = None,
    deadline: Annotated[str | None, _job("Finish --work within this time.")] = None,
    architecture: Annotated[
        list[str] | None,
        _cluster(
            "Shapes allowed, repeatable [under a market all; else tiering, single-anchor, of several clouds "
            "all-on-demand].",
            "--architecture",
        ),
    ] = None,
    region: Annotated[list[str] | None, _cluster("Only this region, repeatable.")] = None,
    zone: Annotated[list[str] | None, _cluster("Only this zone, repeatable.")] = None,
    gpu: Annotated[list[str] | None, _cluster("Only this GPU, repeatable.")] = None,
    min_gpu_memory: Annotated[
        str | None, _cluster("Least memory of one GPU, in GB as GPUs are sold: 24 [what the job needs].")
    ] = None,
    arch: Annotated[str, _cluster("CPU architecture: x86_64, arm64, any.")] = "x86_64",
    fractional_gpus: Annotated[bool, _cluster("Admit slices of GPUs.", "--fractional-gpus")] = False,
    max_nodes: Annotated[int, _cluster("Most machines in one role.")] = 255,
    memory_in: Annotated[str, _cluster("Memory nodes in the workers' zone or region.")] = "zone",
    vendor: Annotated[list[str] | None, _cluster("Makers of GPUs, repeatable; any for all [nvidia].")] = None,
    local_zones: Annotated[bool, _cluster("Admit zones near cities, with few machines.", "--local-zones")] = False,
    market_gpus: Annotated[int | None, _cluster("GPUs of one type that a place has in a market [64].")] = None,
    losses_per_hour: Annotated[
        float, _cluster("How often all spot machines are lost: what slow restores cost.")
    ] = LOSSES_PER_H,
    quota: Annotated[
        list[str] | None, _cluster("vCPUs of a family in a market, as G:spot=128, repeatable.", "--quota")
    ] = None,
    curve: Annotated[str, _model("auto: measured curves where known; all-reduce: for all.")] = "auto",
    saturation: Annotated[str, _model("Network model: auto, table (the paper's), bandwidth.")] = "auto",
    profile: Annotated[
        list[Path] | None,
        _model("Measurements of deepvm calibrate, repeatable: measured machines, others by a roofline."),
    ] = None,
) -> tuple[Catalog, Request]:
    if job is not None and batch is not None:
        raise UsageError("--batch has no effect with --job: a job file has its own")
    of_model = {"precision": precision, "batch": None if model is None else batch, "optimizer": optimizer}
    profiled = load_job(job, model, parallel, {k: v for k, v in of_model.items() if v is not None})
    figures = {
        "batch": batch,
        "checkpoint_bytes": None if checkpoint_size is None else parse_bytes(checkpoint_size),
        "gradient_bytes": None if gradient_size is None else parse_bytes(gradient_size),
        "step_s": None if step_time is None else parse_seconds(step_time),
    }
    make: Callable[..., Request] = Request if profiled is None else partial(Request.for_job, profiled)
    loaded = load_catalogs(catalog or [DEFAULT], None if as_of is None else as_of.date(), price)
    profiles = tuple(read_profile(path) for path in profile or ())
    base = make(
        **{name: value for name, value in figures.items() if value is not None},
        budget_usd=0.0,
        buffers=buffers,
        checkpoint_every_s=parse_seconds(checkpoint_every),
        global_batch=global_batch,
        profiles=profiles,
        ratings=rate_machines(loaded, profiles) if profiles else None,
    )
    return loaded, replace(
        base,
        objective=objective,
        work_eflops_h=None if work is None else parse_work(loaded, work, base),
        deadline_s=None if deadline is None else parse_seconds(deadline),
        architectures=tuple(architecture) if architecture else None,
        region=tuple(region or ()),
        zone=tuple(zone or ()),
        gpu=tuple(gpu or ()),
        min_gpu_memory_gb=None if min_gpu_memory is None else parse_gpu_gb(min_gpu_memory),
        cpu=cast(Any, {"x86": "x86_64", "arm": "arm64"}.get(arch, arch)),  # the request checks the names
        fractional_gpus=fractional_gpus,
        max_nodes=max_nodes,
        memory_in=cast(Any, memory_in),
        vendor=tuple(vendor or ()),
        local_zones=local_zones,
        market_gpus=market_gpus,
        losses_per_h=losses_per_hour,
        quotas=with_quotas(loaded, quota),
        curve=cast(Any, curve),
        saturation=cast(Any, saturation),
    )


def load_job(path: Path | None, model: str | None, parallel: str | None, of_model: dict[str, Any]) -> Job | None:
    """Read the job of ``--job``, or compute that of ``--model``; None without either."""
    if path is not None and model is not None:
        raise UsageError("--job and --model exclude each other: give one of them")
    if model is None and of_model:
        name = f"--{next(iter(of_model))}"
        raise UsageError(f"{name} has no effect without --model: a job file has its own")
    if path is None and model is None:
        if parallel is not None:
            raise UsageError("--parallel has no effect without --job or --model")
        return None
    if parallel not in (None, "ddp", "fsdp"):
        raise UnknownName("parallelism", parallel or "", ("ddp", "fsdp"))
    if path is not None:
        found = read_job(path)
        return found if parallel is None else replace(found, parallel=cast(Any, parallel))
    from deepvm.calibrate.job import profile_model  # imports torch when it is called

    chosen: dict[str, Any] = {**of_model, "parallel": parallel or "ddp"}
    return profile_model(model or "", **chosen)


def load_catalogs(names: list[str], day: date | None, price: str | None) -> Catalog:
    """Load catalogues with their newest prices, those of a day, or a percentile of recent ones; join them."""
    if day is None and price is None:
        return joined([catalogues.load(name) for name in names])
    from deepvm.market import catalog_history  # with all sources of catalogues, which few plans need

    share = None if price is None else _percentile(price)
    found = []
    for name in names:
        one = catalogues.load(name) if day is None else catalog_history.load_as_of(name, day)
        if share is not None:
            known = catalog_history.has_history(one.name)
            one = catalog_history.at_percentile(one, catalog_history.load_history(one.name) if known else None, share)
            stderr.print(escape(one.notes[-1]), style="dim")
        found.append(one)
    return joined(found)


def _percentile(text: str) -> float:
    match = re.fullmatch(r"p(\d{1,3})", text.strip().lower())
    if match is None or int(match[1]) > 100:
        raise UsageError(f"{text!r} is not a valid percentile of prices: write p0 to p100, as in --price p75")
    return float(match[1])


def takes_request(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options above to a command, which then gets ``catalog`` and ``request`` (with budget 0)."""
    return takes(_request_options, "catalog", "request")(command)


def parse_work(catalog: Catalog, text: str, job: Request) -> float:
    """Parse ``40h@g4dn.xlarge``, forty hours of this job on one such machine, or a number of eFLOPS hours."""
    duration, at, instance = text.partition("@")
    if not at:
        try:
            return float(text)
        except ValueError:
            raise UsageError(
                f"{text!r} is not a valid job size: write 40h@g4dn.xlarge, or eFLOPS hours as 15080"
            ) from None
    machine = catalog.instance(instance)
    eflops = job_eflops(machine, catalog.cloud_of(machine), job)
    if eflops is None:
        raise UsageError(f"{machine.name} has no accelerator of known speed: measure --work on another type")
    return parse_seconds(duration) / 3600 * eflops


def with_quotas(catalog: Catalog, texts: list[str] | None) -> tuple[Quota, ...] | None:
    """Return the catalogue's quotas, replaced by those of the command line for the same family and market.

    A family without a machine type is refused: its quota would have no effect."""
    if not texts:
        return None
    new = [_quota(text) for text in texts]
    known = sorted({i.family for i in catalog.instances if i.family is not None})
    for quota, text in zip(new, texts, strict=True):
        if not known:
            raise UsageError(f"--quota {text} has no effect: no machine type of {catalog.name} has a quota family")
        for family in quota.families:
            if not any(replace(quota, families=(family,)).closeness(i) for i in catalog.instances):
                raise UnknownName("quota family of this catalogue", family, known)
    kept = [q for q in catalog.quotas if not any(n.market is q.market and {*n.families} & {*q.families} for n in new)]
    return (*kept, *new)


def _quota(text: str) -> Quota:
    match = re.fullmatch(r"([A-Za-z0-9/]+):(spot|on-demand)=(\d+)", text.strip())
    if match is None:
        raise UsageError(f"{text!r} is not a valid quota: write it like G:spot=128 or P:on-demand=96")
    return Quota(families=tuple(match[1].upper().split("/")), market=Market(match[2]), vcpus=float(match[3]))
