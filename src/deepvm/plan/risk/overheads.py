"""What saves, restores and starts of a cluster take: a board and a candidate in, seconds out.

Measured profiles come first, then the links of the machines, then the documented defaults of ``simulate.Rates``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from deepvm.performance.overheads import overhead
from deepvm.performance.profile import Profile
from deepvm.plan.forecast import part_gbps, restore_forecast
from deepvm.plan.search.board import Board
from deepvm.plan.search.space import Candidate
from deepvm.plan.search.tiers import FAILURES_PER_YEAR
from deepvm.policy.conduct import Tier
from deepvm.simulate.strategies import BOOT_S, Rates
from deepvm.simulate.strategy import Overheads

RATES = Rates()
USUAL = Overheads(start_s=RATES.start_s, regroup_s=RATES.regroup_s, stall_s=RATES.stall_s)  # if nothing is measured
DURABLE_USD_PER_PART = 5e-6  # an upload of one part into S3 Standard, us-east-1, list price of 2026-08
DURABLE_PART_BYTES = 8 * 2**20
NODE_FAILURES_PER_H = FAILURES_PER_YEAR / (365 * 24)
_BYTES_PER_S = 1e9 / 8  # of a Gbit/s


def rough_overheads(board: Board, tier: Tier, worker: int) -> Overheads:
    """Return what a cluster of these workers has before its memory nodes are known: for the screen."""
    size = board.request.checkpoint_bytes
    link = min(RATES.memory_bytes_per_s, float(board.workers.gbps[worker]) * _BYTES_PER_S)
    if tier == "durable":
        over = replace(
            USUAL, stall_s=RATES.durable_stall_s, restore_s=size / RATES.durable_bytes_per_s, save_usd=_save_usd(size)
        )
    else:
        over = replace(USUAL, remote_s=size / link, restore_s=size / link)
    return measured_overheads(over, board.request.profiles, size, tier)


def overheads_of(board: Board, candidate: Candidate, tier: Tier, replicas: int) -> Overheads:
    """Return what this cluster has."""
    over = _by_links(board, candidate, tier, replicas)
    return measured_overheads(over, board.request.profiles, board.request.checkpoint_bytes, tier)


def _by_links(board: Board, candidate: Candidate, tier: Tier, replicas: int) -> Overheads:
    """Return what this cluster has by its links and the defaults, without measurements."""
    size, count = board.request.checkpoint_bytes, candidate.nodes
    link = float(board.workers.gbps[candidate.worker]) * _BYTES_PER_S
    if tier == "durable":
        taken = min(RATES.durable_bytes_per_s, link)
        return replace(
            USUAL,
            stall_s=RATES.durable_stall_s,
            remote_s=size / (taken * count),
            restore_s=size / taken,  # each machine reads all of it
            save_usd=_save_usd(size),
        )
    keeper = next(part for part in candidate.cluster if part.role in ("memory", "anchor") and part.count > 0)
    senders = max(1, count - (keeper.count if keeper.role == "anchor" else 0))
    node_link = keeper.count * part_gbps(board, keeper) * _BYTES_PER_S
    forecast = restore_forecast(board, candidate, float(board.workers.gbps[candidate.worker]))
    into = min(link * senders, node_link)
    return replace(
        USUAL,
        remote_s=size * max(1, replicas) / into if math.isfinite(into) else size / RATES.memory_bytes_per_s,
        restore_s=size / RATES.memory_bytes_per_s if forecast is None else forecast.time.fetch_s,
        move_s=size / RATES.cross_zone_bytes_per_s,
    )


def measured_overheads(over: Overheads, profiles: Sequence[Profile], size: int, tier: Tier) -> Overheads:
    """Return overheads with what profiles measured, at this size of the state."""
    known = {point.name for profile in profiles for point in profile.overheads}
    groups = {
        "stall_s": ("save_stall",), "regroup_s": ("detection", "regroup"), "start_s": ("start", "first_step"),
        "remote_s": ("save_durable" if tier == "durable" else "save_remote",), "restore_s": ("restore",),
    }  # fmt: skip
    found = {
        field: sum(overhead(profiles, name, size).seconds for name in names)
        for field, names in groups.items()
        if known.intersection(names)
    }
    if "start_s" in found:
        found["start_s"] += BOOT_S
    return replace(over, **found)


def lost_node_usd(nodes: int, waiting_h: float, hours: float, cost_usd: float) -> float:
    """Return what the loss of a memory node is expected to cost a job whose checkpoints it alone holds.

    It matters while no worker has the state, and then half of the job is done again."""
    return nodes * NODE_FAILURES_PER_H * waiting_h * cost_usd / 2 if hours > 0 else 0.0


def _save_usd(size: int) -> float:
    return math.ceil(size / DURABLE_PART_BYTES) * DURABLE_USD_PER_PART
