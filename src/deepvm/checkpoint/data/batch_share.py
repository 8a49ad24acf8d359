"""How large a step is when the number of ranks is not the planned one: the user's choice.

``keep-global-batch``: a step has as many samples as ever; each rank takes more of them, or less; the rate stays.
``keep-local-batch``: each rank takes as many as ever; a step has more of them, or less; the learning rate follows it in
proportion (Goyal et al. 2017).
"""

from __future__ import annotations

from dataclasses import dataclass

from deepvm import variables
from deepvm.checkpoint import environment, ranks
from deepvm.errors import UnknownName, UsageError
from deepvm.policy.batch import BATCH_POLICIES, KEEP_GLOBAL, KEEP_LOCAL


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchShare:
    """``ResumableSampler(dataset, global_batch=share.global_batch)`` divides it among the ranks."""

    global_batch: int  # samples of a step, over all ranks
    per_rank: int  # the most that a rank takes of them; others take one less where it cannot be divided evenly
    accumulate: int  # parts in which a rank may compute its own, so that none is larger than planned
    lr_factor: float  # what the planned learning rate is multiplied with


def share_of_batch(
    global_batch: int, *, policy: str | None = None, planned_world_size: int | None = None
) -> BatchShare:
    """This rank's share of a batch that is planned for so many ranks together.

    Call it when torch.distributed is initialized. What is not given comes from the environment, as ``deepvm run`` sets
    it: ``policy`` from DEEPVM_BATCH, else keep-global-batch; ``planned_world_size`` from DEEPVM_PLANNED_WORLD_SIZE,
    else the present number of ranks.
    """
    policy = policy or environment.env_value(variables.BATCH) or KEEP_GLOBAL
    if policy not in BATCH_POLICIES:
        raise UnknownName("batch policy", policy, BATCH_POLICIES)
    _, world_size = ranks.rank_and_world_size()
    planned = _planned_world_size() if planned_world_size is None else planned_world_size
    planned = world_size if planned is None else planned
    if planned < 1:
        raise UsageError(f"{planned} ranks cannot be planned for: give 1 at least")
    if not isinstance(global_batch, int) or global_batch < planned:
        raise UsageError(f"a global batch has a sample for each of {planned} ranks at least, not {global_batch!r}")
    planned_per_rank = -(-global_batch // planned)
    if policy == KEEP_LOCAL:
        samples = round(global_batch * world_size / planned)
        return BatchShare(
            global_batch=samples,
            per_rank=-(-samples // world_size),
            accumulate=1,
            lr_factor=world_size / planned,
        )
    if global_batch < world_size:
        raise UsageError(
            f"a global batch of {global_batch} has no sample for some of {world_size} ranks: make it larger, or choose "
            f"{KEEP_LOCAL}"
        )
    per_rank = -(-global_batch // world_size)
    return BatchShare(
        global_batch=global_batch, per_rank=per_rank, accumulate=-(-per_rank // planned_per_rank), lr_factor=1.0
    )


def _planned_world_size() -> int | None:
    text = environment.env_value(variables.PLANNED_WORLD_SIZE)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{variables.PLANNED_WORLD_SIZE} is {text!r}, and should be a number of ranks") from None
