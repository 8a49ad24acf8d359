"""Why this plan: a plan and its catalogue in; binding constraints, runner-up, and the effect of changes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from deepvm.catalog import Catalog, Market, Quota, binding_quotas
from deepvm.catalog.model import STALE_DAYS
from deepvm.json_fields import json_fields
from deepvm.plan import objectives
from deepvm.plan.planner import first as first_of
from deepvm.plan.planner import recommendation
from deepvm.plan.request import Request
from deepvm.plan.result import Plan, Recommendation
from deepvm.plan.search.board import Board, market_gpus
from deepvm.plan.search.instances import analyse_instances
from deepvm.plan.search.space import Space
from deepvm.units import USD_TOLERANCE, format_bytes, format_count, format_usd

if TYPE_CHECKING:
    from deepvm.plan.risk.reasons import RiskReasons

Find = Callable[
    [Request], Recommendation | None
]  # the best of another request; None if nothing fits, or if it is not better
_FLIP_TOLERANCE_USD = 1e-5
_ROUGH = 0.02  # differences of the estimates under a market that mean nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class QuotaRaise:
    quota: str
    vcpus: float
    wanted_vcpus: float
    performance: float
    gain: float  # of the objective, as a fraction

    def to_json(self) -> dict[str, Any]:
        return json_fields(self, "quota vcpus wanted_vcpus performance gain")


@dataclass(frozen=True, kw_only=True, slots=True)
class PriceAge:
    instance: str
    market: str
    seen: date
    days: int

    @property
    def stale(self) -> bool:
        return self.days > STALE_DAYS

    def to_json(self) -> dict[str, Any]:
        return json_fields(self, "instance market seen days")


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A figure of the job behind a plan, and where it is from: measured, computed, guessed, given or a default."""

    name: str
    value: float | None
    origin: str
    low: float | None = None
    high: float | None = None

    def to_json(self) -> dict[str, Any]:
        return json_fields(self, "name value origin low high")


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    because: str
    binding: tuple[str, ...]
    unspent_usd: float
    links: tuple[str, ...]  # what the all-reduce of each worker type goes through
    batch: str | None  # what a limit of the global batch does; None without one
    figures: tuple[Figure, ...]  # of the job, each with its origin; empty if the request has none
    runner_up: Recommendation | None  # the best cluster of another worker type
    runner_up_behind: float | None  # by this fraction of the objective
    dollar_more: Recommendation | None
    dollar_more_gain: float | None  # fraction of the objective that one more dollar an hour buys
    next_better_usd: float | None  # the smallest budget that buys more, up to twice the budget
    flip_usd: float | None  # price of a worker above which the runner-up wins; None if it never does
    quota_raises: tuple[QuotaRaise, ...]  # the largest gain first
    price_ages: tuple[PriceAge, ...]
    risk: RiskReasons | None = None  # under a market

    def to_json(self) -> dict[str, Any]:
        more = "dollar_more dollar_more_gain next_better_usd flip_usd quota_raises price_ages"
        document = json_fields(
            self, f"because binding unspent_usd links batch figures runner_up runner_up_behind {more}"
        )
        return document if self.risk is None else {**document, "risk": self.risk.to_json()}


def explain(catalog: Catalog, plan: Plan, today: date) -> Explanation:
    """Explain a plan's first recommendation, by clusters of one type and the request's policy.

    Under a market, what would change it is compared by the analytic estimates, which take no replays."""
    chosen = plan.recommendations[0]
    under_market, least = chosen.expected is not None, 1e-9 if chosen.expected is None else _ROUGH
    request = replace(plan.request, mixed=False, market=plan.request.market if under_market else "none")
    board = analyse_instances(catalog, request)
    find = partial(first_of, catalog, traces=None if plan.found is None else plan.found.traces)
    base = (find(request) or chosen) if under_market else chosen

    def better(loosened: Request) -> Recommendation | None:
        found = find(loosened)
        return found if found is not None and _gain(base, found) > least else None

    dollar = find(replace(request, budget_usd=request.budget_usd + 1))
    gain = 0.0 if dollar is None else _gain(base, dollar)
    raises = _quota_raises(catalog, request, base, better)
    if under_market:
        from deepvm.plan.risk.reasons import flip_of_cost, next_better_of, runner_up_of  # with the simulator

        next_better = next_better_of(request, better)
        runner_up = runner_up_of(plan, chosen)
        flip = flip_of_cost(chosen, runner_up)
    else:
        next_better = _next_better_usd(board)
        runner_up = _best_without(objectives.build_space(board), catalog.index_by_name[chosen.worker.instance])
        flip = _flip_usd(board, chosen, runner_up)
    ages = tuple(
        PriceAge(instance=r.instance, market=r.market.value, seen=r.seen, days=(today - r.seen).days)
        for r in chosen.roles
    )
    return Explanation(
        because=_because(board, plan, chosen),
        binding=_binding(board, chosen, better, next_better, raises),
        unspent_usd=request.budget_usd - chosen.hourly_usd,
        links=_links(board, chosen),
        batch=_batch(board, chosen),
        figures=_figures(request),
        runner_up=runner_up,
        runner_up_behind=None if runner_up is None else -_gain(chosen, runner_up),
        dollar_more=dollar,
        dollar_more_gain=None if dollar is None else gain if gain > least else 0.0,
        next_better_usd=next_better,
        flip_usd=flip,
        quota_raises=raises,
        price_ages=ages,
        risk=_risk(plan, ages),
    )


def _risk(plan: Plan, ages: Sequence[PriceAge]) -> RiskReasons | None:
    if plan.found is None:
        return None
    from deepvm.plan.risk.reasons import risk_reasons  # with the simulator

    return risk_reasons(plan.found, max((age.days for age in ages if age.market == Market.SPOT.value), default=0))


def _figures(request: Request) -> tuple[Figure, ...]:
    job = request.job
    if job is None:
        return ()
    given_gb = request.min_gpu_memory_gb
    values: dict[str, float | None] = {
        "checkpoint_bytes": request.checkpoint_bytes,
        "gradient_bytes": request.gradient_bytes_per_step,
        "step_s": request.step_s,
        "gpu_memory_bytes": job.memory_bytes if given_gb is None else given_gb * 1e9,
    }
    return tuple(
        Figure(
            name=name,
            value=values[name],
            origin=origin,
            low=job.step_low_s if name == "step_s" else None,
            high=job.step_high_s if name == "step_s" else None,
        )
        for name, origin in job.origins.items()
    )


def _because(board: Board, plan: Plan, chosen: Recommendation) -> str:
    choices = format_count(len(board.workers) * len(plan.architectures), "choice")
    best = {
        "throughput": "the most performance within the budget",
        "flopp": "the highest FLOPP × n × scaling, the paper's objective",
        "cost": "the lowest cost to finish the job",
        "time": "the shortest time to finish the job",
    }[chosen.objective]
    if chosen.expected is not None:
        best += ", as expected on the spot market" if chosen.objective != "throughput" else ""
    rule = {
        "deepvm": best,
        "noscale": f"{best}, as if scaling were perfect",
        "cost-first": "the type that gives the most machines",
        "performance-first": "the fastest type of which an anchor and a worker fit",
    }[plan.request.policy]
    others = [r for r in plan.architectures if r.architecture != chosen.architecture]
    beaten = "".join(
        f"; {r.architecture} at its best gives {r.objective_value / chosen.objective_value:.0%} of its value"
        for r in others
        if chosen.objective_value
    )
    return f"{rule}, of clusters of every size for {choices} of instance type, place and architecture{beaten}"


def _binding(
    board: Board,
    chosen: Recommendation,
    find: Find,
    next_better_usd: float | None,
    raises: tuple[QuotaRaise, ...],
) -> tuple[str, ...]:
    """Name the constraints whose loosening improves the plan."""
    request, found = board.request, []
    if next_better_usd is not None:
        found.append(f"budget (the next better cluster costs {format_usd(next_better_usd)}/h)")
    found += [f"quota {r.quota} ({r.vcpus:g} vCPUs)" for r in raises]
    held = f"memory and network for {request.buffers} ×" if len(chosen.roles) > 1 else "saves and reads of"
    relaxed: dict[str, Request] = {
        f"--max-nodes {request.max_nodes}": replace(request, max_nodes=request.max_nodes * 2),
        f"{held} {format_bytes(request.checkpoint_bytes)} of checkpoints": request.without_checkpoints(),
    }
    if request.deadline_s is not None:
        relaxed["deadline"] = replace(request, deadline_s=None)
    if request.global_batch is not None:
        relaxed[f"--global-batch {request.global_batch}"] = replace(request, global_batch=None)
    if request.job is not None and request.job.memory_bytes is not None:
        relaxed[f"{format_bytes(request.job.memory_bytes)} of GPU memory"] = replace(request, job=None)
    most_gpus = market_gpus(request, board.saturation)
    if np.isfinite(most_gpus):
        expected = f"--market-gpus ({format_count(most_gpus, 'GPU')} of one type in a place)"
        relaxed[expected] = replace(request, market_gpus=2 * int(most_gpus))
    places = request.zones or request.regions
    if places:
        relaxed[f"place ({', '.join(places)})"] = replace(request, zone=None, region=None)
    for name, loosened in relaxed.items():
        if find(loosened) is not None:
            found.append(name)
    return tuple(found) or ("none: twice the money, more quota or more machines would not help",)


def _links(board: Board, chosen: Recommendation) -> tuple[str, ...]:
    trained = dict.fromkeys(role.instance for role in chosen.roles if role.role != "memory")
    links = {name: board.links[board.catalog.index_by_name[name]] for name in trained}
    efa = all(found.efa for found in links.values())
    return tuple(f"{name}: {found.in_ring(efa=efa).text}" for name, found in links.items())


def _batch(board: Board, chosen: Recommendation) -> str | None:
    """Say how a limit of the global batch divides over the chosen cluster."""
    limit = board.request.global_batch
    if limit is None:
        return None
    row = np.flatnonzero(board.workers.instance == board.catalog.index_by_name[chosen.worker.instance])[:1]
    gpus, full = float(board.workers.gpus[row][0]) * chosen.nodes, float(board.full_batch(row)[0])
    if full * gpus <= limit:
        return f"{full:.4g} samples on each of {format_count(gpus, 'GPU')}, within the limit of {limit}"
    each = f"{limit / gpus:.4g} samples on each of {format_count(gpus, 'GPU')}"
    return f"{each}, whose memory takes {full:.4g}: a limit of {limit} in all"


def _next_better_usd(board: Board) -> float | None:
    """Return the price of the cheapest cluster that beats the best one within the budget."""
    budget = board.request.budget_usd
    wider = replace(board, request=replace(board.request, budget_usd=2 * budget + 1))
    beyond = objectives.build_space(wider).frontier().hourly_usd
    beyond = beyond[beyond > budget + USD_TOLERANCE]
    return float(beyond[0]) if beyond.size else None


def _quota_raises(catalog: Catalog, request: Request, chosen: Recommendation, find: Find) -> tuple[QuotaRaise, ...]:
    quotas = request.quotas_of(catalog)
    raises = []
    for i, quota in enumerate(quotas):
        better = find(replace(request, quotas=(*quotas[:i], *quotas[i + 1 :])))
        if better is not None:
            raises.append(
                QuotaRaise(
                    quota=quota.name,
                    vcpus=quota.vcpus,
                    wanted_vcpus=_used(catalog, quotas, quota, better, request.published),
                    performance=better.performance,
                    gain=_gain(chosen, better),
                )
            )
    return tuple(sorted(raises, key=lambda r: -r.gain))


def _used(catalog: Catalog, quotas: Sequence[Quota], quota: Quota, cluster: Recommendation, published: bool) -> float:
    """Return the vCPUs of a quota that a cluster needs; the published search stays one machine below."""
    used = 0.0
    for role in cluster.roles:
        instance = catalog.instance(role.instance)
        if instance.vcpus and quota in binding_quotas(quotas, instance, role.market, role.region):
            used += instance.vcpus * (role.count + (1 if published else 0))
    return used


def _gain(chosen: Recommendation, other: Recommendation) -> float:
    """Return the gain of the other as a fraction of the objective: 0.1 is ten percent more, or cheaper, or faster."""
    if chosen.objective in ("cost", "time"):
        return chosen.objective_value / other.objective_value - 1
    return other.objective_value / chosen.objective_value - 1


def _best_without(space: Space, worker_type: int) -> Recommendation | None:
    """Return the best cluster of another worker type."""
    others = (space.board.workers.instance != worker_type)[None, :, None]
    best = space.best(space.board.request.budget_usd, 1, keep=others)
    return recommendation(space.board, best[0], 2) if best else None


def _flip_usd(board: Board, chosen: Recommendation, runner_up: Recommendation | None) -> float | None:
    """Return the price of one worker at which the runner-up wins, by bisection over the chosen type alone.

    The runner-up does not use the chosen type, so its value is constant."""
    if runner_up is None:
        return None
    role = chosen.worker
    index = board.catalog.index_by_name[role.instance]
    of_type = np.flatnonzero(board.workers.instance == index)
    columns = {name: getattr(board.workers, name)[of_type] for name in board.workers.__dataclass_fields__}
    price = "spot_usd" if role.market.value == "spot" else "on_demand_usd"
    places = board.catalog.places

    def holds(usd: float) -> bool:
        here = (role.cloud or board.catalog.provider, role.region, role.zone)
        in_place = [(board.catalog.cloud_at(p), *places[p]) == here for p in columns["place"]]
        moved = {**columns, price: np.where(in_place, usd, columns[price])}
        only = replace(board, workers=replace(board.workers, **moved))
        best = objectives.build_space(only).best(board.request.budget_usd, 1)
        return bool(best) and _gain(recommendation(only, best[0], 1), runner_up) < 0

    low, high = role.usd_per_hour, board.request.budget_usd + USD_TOLERANCE
    if not holds(low) or holds(high):  # another place wins before another type does
        return None
    while high - low > _FLIP_TOLERANCE_USD:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
