"""Forecast the restore after a preemption: a board and a candidate in, seconds by ``performance.restore`` out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from deepvm.performance.overheads import restore_path
from deepvm.performance.restore import RestorePath, restore_s, restore_time
from deepvm.plan.architectures import Part
from deepvm.plan.request import CHECKPOINT_OVER_GRADIENTS
from deepvm.plan.result import RestoreForecast
from deepvm.plan.search.board import Board
from deepvm.plan.search.space import Candidate

_BYTES_PER_GBIT = 1e9 / 8


def restore_forecast(board: Board, candidate: Candidate, slowest_gbps: float) -> RestoreForecast | None:
    """Forecast for all workers at once: after one loss, elastic launchers restart all.

    None if no machine of the cluster keeps checkpoints, or a bandwidth is unknown."""
    keeper = next((part for part in candidate.cluster if part.role in ("memory", "anchor") and part.count > 0), None)
    if keeper is None:
        return None
    workers = candidate.nodes - (
        keeper.count if keeper.role == "anchor" else 0
    )  # an anchor has the state in its own memory
    node_gbps = part_gbps(board, keeper)
    if workers < 1 or not (0 < slowest_gbps < np.inf and 0 < node_gbps < np.inf):
        return None
    modelled = RestorePath(
        state_bytes=board.request.checkpoint_bytes,
        worker_link_bytes_per_s=slowest_gbps * _BYTES_PER_GBIT,
        node_link_bytes_per_s=node_gbps * _BYTES_PER_GBIT,
        memory_nodes=keeper.count,
        workers=workers,
        first_step_s=float(board.compute_s(np.array([candidate.worker]))[0]),
    )
    trainer = board.catalog.instances[int(board.workers.instance[candidate.worker])].name
    path, measured = restore_path(board.request.profiles, modelled, instance=trainer)
    soonest = replace(path, overlapped=True, on_demand=True, first_loss_share=1 / CHECKPOINT_OVER_GRADIENTS)
    return RestoreForecast(
        state_bytes=board.request.checkpoint_bytes,
        workers=workers,
        memory_nodes=keeper.count,
        time=restore_time(path),
        on_demand_s=restore_s(soonest),
        measured=measured,
    )


def part_gbps(board: Board, part: Part) -> float:
    rows = board.memory if part.role == "memory" else board.workers
    return float(rows.gbps[np.flatnonzero(rows.instance == part.instance)[0]])
