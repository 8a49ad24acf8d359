"""``deepvm profile --model gpt2``: a model's name in, its Job by formula out. Needs torch, but no weights and no GPU.

Parameters and FLOPs are counted on the meta device; memory follows from precision, optimizer and parallelism. With bf16
or fp16, computation is in 16 bits and weights, gradients and optimizer are in 32 (autocast, FSDP's mixed precision).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, get_args

from deepvm.calibrate.job.memory import memory_parts
from deepvm.errors import DeepvmError, MissingExtra, UnknownName, UsageError
from deepvm.performance.job import Component, Job, Origin, Parallel

if TYPE_CHECKING:
    from torch import nn

OPTIMIZERS = {"adamw": "AdamW", "sgd": "SGD", "adafactor": "Adafactor"}  # by their names in torch.optim
PRECISIONS = ("fp32", "bf16", "fp16")
MOST_BATCH = 2**20
FSDP_OVER_ALLREDUCE = 1.5  # two gathers and a scatter, where an all-reduce is a gather and a scatter
_WIDTH = {"fp32": 4, "bf16": 2, "fp16": 2}


def profile_model(
    name: str,
    *,
    precision: str = "fp32",
    batch: int | None = None,
    parallel: Parallel = "ddp",
    optimizer: str = "adamw",
) -> Job:
    """Return the job of training a built-in model, or that of a transformers configuration file, for one worker.

    ``batch`` is in images, or in texts of the model's whole context. SGD has momentum."""
    for kind, value, known in (
        ("precision", precision, PRECISIONS),
        ("optimizer", optimizer, OPTIMIZERS),
        ("parallelism", parallel, get_args(Parallel)),
    ):
        if value not in known:
            raise UnknownName(kind, value, known)
    if batch is not None and not 1 <= batch <= MOST_BATCH:
        raise UsageError(f"the batch is {batch}: it must be from 1 to {MOST_BATCH}")
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtra("--model", "train") from None
    from deepvm.calibrate.models import dry_run, registry, transformers_config

    title, spec = (
        transformers_config.load_config(name) if transformers_config.is_config(name) else registry.find_model(name)
    )
    batch = batch or spec.batch
    model = dry_run.on_meta(spec.make)
    parameters = sum(p.numel() for p in model.parameters())
    weights = 4 * parameters + sum(b.numel() * b.element_size() for b in model.buffers())
    saved = sum(t.numel() * t.element_size() for t in _saved(model))
    gathered = 2 * _WIDTH[precision] * dry_run.largest_unit(model)  # one is computed while the next arrives
    options = {"momentum": 0.9} if optimizer == "sgd" else {}
    update = dry_run.dry_update(getattr(torch.optim, OPTIMIZERS[optimizer])(model.parameters(), lr=1e-3, **options))
    state = update.state_bytes
    header = _header_bytes(model, saved + state)
    notes: list[str] = []
    step: dry_run.Counts | None = None
    try:
        step = dry_run.dry_step(model, spec, batch, precision, update)
    except DeepvmError:
        raise
    except Exception as error:  # of another library's model, which may need real values
        notes.append(
            "FLOPs are 6 for each parameter and token, and memory is without activations: the model cannot run without "
            f"data ({str(error)[:200]})"
        )
    tokens = batch * (spec.size if spec.of_text else 1)
    parts = memory_parts(
        weights=weights, gradients=4 * parameters, optimizer=state,
        activations=0 if step is None else step.activation_bytes, parallel=parallel,
        casts=2 * parameters if precision != "fp32" else 0, gathered=gathered,
    )  # fmt: skip
    exchanged = 4 * parameters if parallel == "ddp" else round(FSDP_OVER_ALLREDUCE * _WIDTH[precision] * parameters)
    counted: Origin = "guessed" if step is None else "computed"
    return Job(
        name=title[:200],
        parameters=parameters,
        trainable_parameters=parameters,
        components={
            "model": Component(bytes=saved, changed_bytes=saved),
            "optimizer": Component(bytes=state, changed_bytes=state),
            "header": Component(bytes=header, changed_bytes=header),
        },
        gradient_bytes=exchanged,
        batch=batch,
        flops_per_step=6.0 * parameters * tokens if step is None else step.flops,
        traffic_bytes_per_step=None if step is None else float(step.traffic_bytes),
        memory_bytes=sum(parts.values()),
        memory_parts=parts,
        precision=precision,
        parallel=parallel,
        origins={
            "components": "computed", "gradient_bytes": "computed", "flops_per_step": counted, "memory_bytes": counted,
            **({"traffic_bytes_per_step": "computed"} if step is not None else {}),
        },
        notes=tuple(notes),
    )  # fmt: skip


def _saved(model: nn.Module) -> Sequence[Any]:
    """Return the tensors of a model's state_dict, a tied one once."""
    return list({id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}.values())


def _header_bytes(model: nn.Module, data_bytes: int) -> int:
    """Return about the size of a checkpoint's header: names, shapes and places of each tensor, with room to grow."""
    from deepvm.checkpoint.state.layout import header_size

    names = list(model.state_dict(keep_vars=True))
    rows = len(names) + 3 * len(list(model.parameters()))
    return header_size(64 * 1024 + 8 * sum(map(len, names)) + 300 * rows, data_bytes)
