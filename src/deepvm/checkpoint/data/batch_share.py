"""A planned global batch and the present number of ranks -> this rank's share, for the user's ``ResumableSampler``.

``keep-global-batch``: the batch of a step stays; that of a rank changes; the learning rate stays.
``keep-local-batch``: the batch of a rank stays; that of a step changes, and the learning rate in proportion to it
(Goyal et al. 2017).
"""

from __future__ import annotations

from dataclasses import dataclass

from deepvm import variables
from deepvm.checkpoint import environment, ranks
from deepvm.errors import UnknownName, UsageError
from deepvm.policy.batch import BATCH_POLICIES, KEEP_GLOBAL, KEEP_LOCAL


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchShare:
    """Pass it on as ``ResumableSampler(dataset, global_batch=share.global_batch)``."""

    global_batch: int  # samples of a step, over all ranks
    per_rank: int  # the most samples of one rank; if it cannot be divided evenly, others have one less
    accumulate: int  # parts in which a rank may compute its samples, so that none is larger than planned
    lr_factor: float  # of the planned learning rate


def share_of_batch(
    global_batch: int, *, policy: str | None = None, planned_world_size: int | None = None
) -> BatchShare:
    """Return this rank's share of a global batch.

    Call it when torch.distributed is initialized. Defaults come from the environment, as ``deepvm run`` sets it:
    ``policy`` from DEEPVM_BATCH, else keep-global-batch; ``planned_world_size`` from DEEPVM_PLANNED_WORLD_SIZE, else
    the present number of ranks.
    """
    policy = policy or environment.env_value(variables.BATCH) or KEEP_GLOBAL
    if policy not in BATCH_POLICIES:
        raise UnknownName("batch policy", policy, BATCH_POLICIES)
    _, world_size = ranks.rank_and_world_size()
    planned = _planned_world_size(world_size) if planned_world_size is None else planned_world_size
    if planned < 1:
        raise UsageError(f"planned_world_size is {planned} ranks: pass 1 or more")
    if not isinstance(global_batch, int) or global_batch < planned:
        raise UsageError(f"global_batch is {global_batch!r}: it needs at least one sample for each of {planned} ranks")
    if policy == KEEP_LOCAL:
        samples = round(global_batch * world_size / planned)
        per_rank = -(-samples // world_size)
        return BatchShare(global_batch=samples, per_rank=per_rank, accumulate=1, lr_factor=world_size / planned)
    if global_batch < world_size:
        raise UsageError(
            f"a global batch of {global_batch} has no sample for some of {world_size} ranks: make it larger, or choose "
            f"{KEEP_LOCAL}"
        )
    per_rank, planned_per_rank = -(-global_batch // world_size), -(-global_batch // planned)
    accumulate = -(-per_rank // planned_per_rank)
    return BatchShare(global_batch=global_batch, per_rank=per_rank, accumulate=accumulate, lr_factor=1.0)


def _planned_world_size(otherwise: int) -> int:
    text = environment.env_value(variables.PLANNED_WORLD_SIZE)
    try:
        return otherwise if text is None else int(text)
    except ValueError:
        raise UsageError(f"{variables.PLANNED_WORLD_SIZE} is {text!r}, not a number of ranks") from None
