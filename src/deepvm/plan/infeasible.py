"""Why nothing fits: a board without a cluster in, an Infeasible error with the cheapest price or the constraint out."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from deepvm.errors import Infeasible
from deepvm.plan import objectives
from deepvm.plan.architectures import AllOnDemand, AllSpot
from deepvm.plan.request import Request
from deepvm.plan.search.board import Board, market_gpus
from deepvm.plan.search.instances import analyse_instances
from deepvm.units import USD_TOLERANCE, format_bytes, format_seconds, format_usd

ANY_PRICE_USD = 1e12
ANY_NUMBER = 10**9
MOST_NODES = 255


def infeasible(board: Board) -> Infeasible:
    """Make the error of a request without a feasible cluster."""
    request = board.request
    if not len(board.workers):
        reasons = "; ".join(f"{x.count} × {x.reason}" for x in board.left_out[:4]) or "the catalogue has no GPU types"
        return Infeasible(f"no GPU type fits ({reasons}): allow more types or places")
    space = objectives.build_space(replace(board, request=replace(request, budget_usd=ANY_PRICE_USD)))
    if not space.possible.size:
        return Infeasible(_missing_market(board) or _binding(board))
    nearest_h = _nearest_h(board)
    instead = "" if nearest_h is None else f", or allow {nearest_h:g}h"
    cheapest = float(space.hourly_usd.reshape(-1)[space.possible[0]])
    return Infeasible(
        f"the cheapest plan costs {format_usd(cheapest)}/h, the budget is {format_usd(request.budget_usd)}/h: "
        f"raise --budget or allow more instance types{instead}",
        cheapest_usd=cheapest,
    )


def _nearest_h(board: Board) -> float | None:
    """Return the nearest deadline that the budget keeps, rounded up, if spot machines stay; None without a deadline."""
    request = board.request
    if request.deadline_s is None or request.work_eflops_h is None:
        return None
    space = objectives.build_space(replace(board, request=replace(request, deadline_s=None)))
    within = (space.score > -np.inf) & (space.hourly_usd <= request.budget_usd + USD_TOLERANCE)
    if not within.any():
        return None
    fastest = np.broadcast_to(space.performance, within.shape)[within].max()
    return math.ceil(request.work_eflops_h / float(fastest) * 100) / 100


def _missing_market(board: Board) -> str | None:
    """Name the market that the architectures need and the catalogue lacks, and an alternative."""
    request, catalog = board.request, board.catalog
    kinds = objectives.allowed_architectures(board)
    names = " and ".join(kind.name for kind in kinds)
    where = f" in {', '.join(request.zones or request.regions)}" if request.zones or request.regions else ""
    spot = bool(np.isfinite(board.workers.spot_usd).any())
    if not spot and (request.published or not any(isinstance(kind, AllOnDemand) for kind in kinds)):
        instead = [
            *(["--objective throughput"] if request.published else []),
            *(["--policy deepvm"] if request.policy not in ("deepvm", "noscale") else []),
            "--architecture all-on-demand",
        ]
        return (
            f"{catalog.name} has no spot price of any GPU type{where}, and {names} "
            f"{'is' if len(kinds) == 1 else 'are'} made of spot workers: add {' '.join(instead)}, "
            f"or choose a catalogue with spot prices"
        )
    on_demand = bool(np.isfinite(board.workers.on_demand_usd).any()) or len(board.memory) > 0
    if not on_demand and not any(isinstance(kind, AllSpot) for kind in kinds):
        return (
            f"{catalog.name} has no on-demand price{where}, and {names} need a machine that is never preempted: "
            f"add --architecture all-spot, or choose a catalogue with on-demand prices"
        )
    return None


def _binding(board: Board) -> str:
    """Name each constraint whose removal would leave a cluster; all of them if none suffices."""
    request = board.request
    size = f"{request.buffers} × {format_bytes(request.checkpoint_bytes)}"
    without: list[tuple[str, str, Request]] = [
        ("the quotas", "raise a quota", replace(request, quotas=())),
        (
            f"checkpoints of {size} every {format_seconds(request.checkpoint_every_s)}",
            "save less or less often",
            request.without_checkpoints(),
        ),
        ("the memory nodes' zone", "allow --memory-in region", replace(request, memory_in="region")),
    ]
    if request.deadline_s is not None:
        nearest_h = _nearest_h(replace(board, request=replace(request, budget_usd=ANY_PRICE_USD)))
        later = "allow more time" if nearest_h is None else f"allow {nearest_h:g}h"
        without.append(("the deadline", later, replace(request, deadline_s=None)))
    if request.global_batch is not None:
        limit = f"--global-batch {request.global_batch}"
        without.append((limit, "allow a larger batch", replace(request, global_batch=None)))
    if request.job is not None and request.job.memory_bytes is not None:
        need = f"{format_bytes(request.job.memory_bytes)} of GPU memory for {request.job.name}"
        without.append((need, "train it with smaller batches", replace(request, job=None)))
    most_gpus = market_gpus(request, board.saturation)
    if np.isfinite(most_gpus):
        expected = f"--market-gpus {most_gpus:g}"
        without.append((expected, "expect more of a market", replace(request, market_gpus=ANY_NUMBER)))
    without.append((f"--max-nodes {request.max_nodes}", "allow more", replace(request, max_nodes=MOST_NODES)))
    found = [(what, remedy) for what, remedy, loosened in without if _feasible(board, loosened)]
    if found:
        return (
            f"no cluster meets {' or '.join(what for what, _ in found)}, at any price: "
            f"{' or '.join(remedy for _, remedy in found)}"
        )
    return (
        "no cluster meets the quotas, the checkpoint's memory and network, and the deadline, at any price: "
        "raise a quota, save less often, or allow more types, places or architectures"
    )


def _feasible(board: Board, request: Request) -> bool:
    wider = analyse_instances(board.catalog, replace(request, budget_usd=ANY_PRICE_USD))
    return bool(len(wider.workers)) and bool(objectives.build_space(wider).possible.size)
