"""The options that ``plan`` and ``sweep`` share, and how they become a Request."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, cast

import typer

from deepvm import catalog as catalogues
from deepvm.catalog import Catalog, Market, Quota
from deepvm.catalog.library import DEFAULT
from deepvm.errors import UnknownName, UsageError
from deepvm.plan import OBJECTIVES, POLICIES, Request
from deepvm.plan.request import PAPER_ARCHITECTURES
from deepvm.plan.search.instances import eflops_of
from deepvm.units import parse_bytes, parse_gpu_gb, parse_seconds

JOB, CLUSTER, MODEL = "The job", "What the cluster may be made of", "How it is modelled"

CatalogName = Annotated[str, typer.Option("--catalog", help="A catalogue's name, or a file.")]
Objective = Annotated[str, typer.Option(help=f"What counts as better: {', '.join(OBJECTIVES)}.")]
Policy = Annotated[str, typer.Option(help=f"Who chooses: {', '.join(POLICIES)}.")]
CheckpointSize = Annotated[str, typer.Option(help="Bytes of one checkpoint.", rich_help_panel=JOB)]
Buffers = Annotated[int, typer.Option(help="Checkpoints kept in memory.", rich_help_panel=JOB)]
CheckpointEvery = Annotated[str, typer.Option(help="Time between checkpoints.", rich_help_panel=JOB)]
GradientSize = Annotated[
    str | None,
    typer.Option(help="Gradients exchanged in a step [a third of the checkpoint].", rich_help_panel=JOB),
]
StepTime = Annotated[str, typer.Option(help="Compute of one step on one T4.", rich_help_panel=JOB)]
Work = Annotated[
    str | None,
    typer.Option(help="The whole job: 40h@g4dn.xlarge, or a number of eFLOPS hours.", rich_help_panel=JOB),
]
Deadline = Annotated[str | None, typer.Option(help="Finish --work within this time.", rich_help_panel=JOB)]
Architectures = Annotated[
    list[str] | None,
    typer.Option(
        "--architecture", help="Shapes allowed, repeatable [tiering, single-anchor].", rich_help_panel=CLUSTER
    ),
]
Region = Annotated[list[str] | None, typer.Option(help="Only this region, repeatable.", rich_help_panel=CLUSTER)]
Zone = Annotated[list[str] | None, typer.Option(help="Only this zone, repeatable.", rich_help_panel=CLUSTER)]
Gpu = Annotated[list[str] | None, typer.Option(help="Only this GPU, repeatable.", rich_help_panel=CLUSTER)]
MinGpuMemory = Annotated[
    str | None, typer.Option(help="Least memory of one GPU, in GB as GPUs are sold: 24.", rich_help_panel=CLUSTER)
]
Arch = Annotated[str, typer.Option(help="CPU architecture: x86_64, arm64, any.", rich_help_panel=CLUSTER)]
FractionalGpus = Annotated[
    bool, typer.Option("--fractional-gpus", help="Admit slices of GPUs.", rich_help_panel=CLUSTER)
]
MaxNodes = Annotated[int, typer.Option(help="Most machines in one role.", rich_help_panel=CLUSTER)]
MemoryIn = Annotated[str, typer.Option(help="Memory nodes in the workers' zone or region.", rich_help_panel=CLUSTER)]
Quotas = Annotated[
    list[str] | None,
    typer.Option("--quota", help="vCPUs of a family in a market, as G:spot=128, repeatable.", rich_help_panel=CLUSTER),
]
Curve = Annotated[
    str, typer.Option(help="auto: measured curves where known; all-reduce: for all.", rich_help_panel=MODEL)
]
Saturation = Annotated[
    str, typer.Option(help="Network model: auto, table (the paper's), bandwidth.", rich_help_panel=MODEL)
]


def _request_options(
    catalog: CatalogName = DEFAULT,
    objective: Objective = "throughput",
    checkpoint_size: CheckpointSize = "300MB",
    buffers: Buffers = 2,
    checkpoint_every: CheckpointEvery = "60s",
    gradient_size: GradientSize = None,
    step_time: StepTime = "0.5s",
    work: Work = None,
    deadline: Deadline = None,
    architecture: Architectures = None,
    region: Region = None,
    zone: Zone = None,
    gpu: Gpu = None,
    min_gpu_memory: MinGpuMemory = None,
    arch: Arch = "x86_64",
    fractional_gpus: FractionalGpus = False,
    max_nodes: MaxNodes = 255,
    memory_in: MemoryIn = "zone",
    quota: Quotas = None,
    curve: Curve = "auto",
    saturation: Saturation = "auto",
) -> tuple[Catalog, Request]:
    market = catalogues.load(catalog)
    return market, Request(
        budget_usd=0.0,
        objective=objective,
        checkpoint_bytes=parse_bytes(checkpoint_size),
        buffers=buffers,
        checkpoint_every_s=parse_seconds(checkpoint_every),
        gradient_bytes=None if gradient_size is None else parse_bytes(gradient_size),
        step_s=parse_seconds(step_time),
        work_eflops_h=None if work is None else parse_work(market, work),
        deadline_s=None if deadline is None else parse_seconds(deadline),
        architectures=tuple(architecture or PAPER_ARCHITECTURES),
        region=tuple(region or ()),
        zone=tuple(zone or ()),
        gpu=tuple(gpu or ()),
        min_gpu_memory_gb=None if min_gpu_memory is None else parse_gpu_gb(min_gpu_memory),
        cpu=cast(Any, {"x86": "x86_64", "arm": "arm64"}.get(arch, arch)),  # the request checks the names
        fractional_gpus=fractional_gpus,
        max_nodes=max_nodes,
        memory_in=cast(Any, memory_in),
        quotas=with_quotas(market, quota),
        curve=cast(Any, curve),
        saturation=cast(Any, saturation),
    )


def takes_request(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options above. It is called with ``market`` and ``request`` (of budget 0) made of them."""
    shared = inspect.signature(_request_options, eval_str=True).parameters
    own = inspect.signature(command, eval_str=True).parameters
    kept = [p for name, p in own.items() if name not in ("market", "request")]

    @functools.wraps(command)
    def called(**values: Any) -> None:
        given = {name: values.pop(name) for name in shared}
        market, request = _request_options(**given)
        command(market=market, request=request, **values)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*kept, *shared.values())]
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {p.name: p.annotation for p in parameters}
    del called.__wrapped__
    return called


def parse_work(catalog: Catalog, text: str) -> float:
    """``40h@g4dn.xlarge``: forty hours of one such machine; or a plain number of eFLOPS hours."""
    duration, at, instance = text.partition("@")
    if not at:
        try:
            return float(text)
        except ValueError:
            raise UsageError(f"{text!r} is no job size: write 40h@g4dn.xlarge, or eFLOPS hours as 15080") from None
    machine = catalog.instance(instance)
    eflops, _ = eflops_of(machine)
    if eflops is None:
        raise UsageError(f"{machine.name} is no machine that trains, or of unknown speed: measure --work on another")
    return parse_seconds(duration) / 3600 * eflops


def with_quotas(catalog: Catalog, texts: list[str] | None) -> tuple[Quota, ...] | None:
    """The catalogue's quotas, with those given on the command line in the place of the same family's and market's.

    A family that no machine type is of is refused: its quota would bind nothing, and nobody would notice."""
    if not texts:
        return None
    given = [_quota(text) for text in texts]
    known = sorted({i.family for i in catalog.instances if i.family is not None})
    for quota, text in zip(given, texts, strict=True):
        if not known:
            raise UsageError(f"--quota {text} cannot bind: no machine type of {catalog.name} has a quota family")
        for family in quota.families:
            if not any(replace(quota, families=(family,)).closeness(i) for i in catalog.instances):
                raise UnknownName("quota family of this catalogue", family, known)
    kept = [
        q for q in catalog.quotas if not any(g.market is q.market and set(g.families) & set(q.families) for g in given)
    ]
    return (*kept, *given)


def _quota(text: str) -> Quota:
    match = re.fullmatch(r"([A-Za-z0-9/]+):(spot|on-demand)=(\d+)", text.strip())
    if match is None:
        raise UsageError(f"{text!r} is no quota: write it like G:spot=128 or P:on-demand=96")
    return Quota(families=tuple(match[1].upper().split("/")), market=Market(match[2]), vcpus=float(match[3]))
