"""Small random markets, and the plainest search there is over them: the judge of the planner's arrays."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date

import numpy as np
from hypothesis import strategies as st

from deepvm.catalog import Catalog, Instance, Market, Prices, Quota
from deepvm.catalog.check import bid_floor_usd
from deepvm.performance import table_workers
from deepvm.plan import OBJECTIVES, POLICIES, Request
from deepvm.plan.search.board import ANCHOR_SHARE, MARKET_GPUS, OS_HEADROOM_GIB, USABLE_MEMORY
from deepvm.plan.search.instances import analyse_instances, eflops_of
from deepvm.plan.search.tiers import MOST_NODES, NODE_USD

DAY = date(2026, 8, 22).toordinal()
TOLERANCE_USD = 1e-6


def prices(rows: list[tuple[int, int, float]]) -> Prices:
    return Prices(
        instance=np.array([r[0] for r in rows], dtype=np.int32),
        place=np.array([r[1] for r in rows], dtype=np.int32),
        usd_per_hour=np.array([r[2] for r in rows], dtype=np.float64),
        seen=np.full(len(rows), DAY, dtype=np.int32),
    )


def small_catalog(
    instances: list[Instance],
    on_demand: list[tuple[int, int, float]],
    spot: list[tuple[int, int, float]],
    *,
    places: tuple[tuple[str, str | None], ...] = (("r1", None),),
    quotas: tuple[Quota, ...] = (),
    saturation: str = "bandwidth",
) -> Catalog:
    return Catalog(
        name="small",
        provider="test",
        description="",
        instances=tuple(instances),
        places=places,
        prices={Market.ON_DEMAND: prices(on_demand), Market.SPOT: prices(spot)},
        quotas=quotas,
        saturation=saturation,
    )


cents = st.integers(1, 120).map(lambda c: c / 100)
curves = st.none() | st.builds(
    lambda a, b, c: {"model": "logistic", "a": a, "b": b, "c": c},
    st.sampled_from([0.09, 0.2, 0.5]),
    st.sampled_from([1.5, 3.0, 10.0]),
    st.sampled_from([2.0, 5.0]),
)
gpu_types = st.builds(
    lambda i, vcpus, eflops, gbps, speedup, gib, gpus: Instance(
        name=f"g{i}", family="G", vcpus=vcpus, memory_gib=gib, accelerator="T4", accelerator_count=gpus,
        accelerator_memory_gib=16.0, eflops=eflops, sustained_gbps=gbps, speedup=speedup,
    ),
    st.integers(0, 10**6), st.sampled_from([4, 8]), st.sampled_from([100.0, 377.0, 700.0]),
    st.sampled_from([0.15, 0.3, 5.0, 25.0]), curves, st.sampled_from([None, 1.0, 64.0]),
    st.sampled_from([1, 1, 8]),
)  # fmt: skip
cpu_types = st.builds(
    lambda i, vcpus, gib, gbps: Instance(
        name=f"c{i}", family="C", vcpus=vcpus, memory_gib=gib, sustained_gbps=gbps
    ),
    st.integers(0, 10**6), st.sampled_from([2, 4]), st.sampled_from([1.0, 2.0, 16.0]),
    st.sampled_from([0.15, 0.3, 1.7, 10.0]),
)  # fmt: skip


@st.composite
def markets(draw: st.DrawFn) -> Catalog:
    gpus = draw(st.lists(gpu_types, min_size=1, max_size=3, unique_by=lambda i: i.name))
    cpus = draw(st.lists(cpu_types, min_size=0, max_size=3, unique_by=lambda i: i.name))
    places = draw(
        st.sampled_from(
            [
                (("r1", None),),
                (("r1", "a"), ("r1", "b")),
                (("r1", "a"), ("r2", "a2"), ("r1", "b")),
                (("r1", None), ("r1", "a"), ("r1", "b"), ("r2", None)),
            ]
        )
    )
    instances = [*gpus, *cpus]
    cells = [(i, p) for i in range(len(instances)) for p in range(len(places))]
    offers = {market: [(i, p, draw(cents)) for i, p in cells if draw(st.integers(0, 9)) < 8] for market in Market}
    quota = st.builds(
        lambda family, market, vcpus, region: Quota(families=(family,), market=market, vcpus=vcpus, region=region),
        st.sampled_from(["G", "C"]), st.sampled_from(list(Market)), st.sampled_from([0, 4, 8, 12, 20]),
        st.sampled_from([None, "r1"]),
    )  # fmt: skip
    return small_catalog(
        instances,
        offers[Market.ON_DEMAND],
        offers[Market.SPOT],
        places=places,
        quotas=tuple(draw(st.lists(quota, max_size=2))),
        saturation=draw(st.sampled_from(["bandwidth", "table"])),
    )


@st.composite
def requests(draw: st.DrawFn, **fixed: object) -> Request:
    drawn: dict[str, object] = {
        "budget_usd": draw(st.integers(0, 600)) / 100,
        "objective": draw(st.sampled_from(OBJECTIVES)),
        "policy": draw(st.sampled_from(POLICIES)),
        "max_nodes": draw(st.integers(1, 7)),
        "checkpoint_bytes": draw(st.sampled_from([0, 300_000_000, 3_000_000_000])),
        "checkpoint_every_s": draw(st.sampled_from([10.0, 60.0])),
        "buffers": draw(st.integers(1, 3)),
        "work_eflops_h": 1000.0,
        "deadline_s": draw(st.sampled_from([None, 3600.0])),
        "architectures": draw(
            st.sampled_from([("tiering", "single-anchor"), ("all-spot",), ("tiering", "all-on-demand", "all-spot")])
        ),
        "memory_in": draw(st.sampled_from(["zone", "region"])),
        "market": "none",
        **fixed,
    }
    return Request(**drawn)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Found:
    architecture: str
    worker: int
    place: int
    nodes: int
    usd: float
    performance: float


def every_cluster(catalog: Catalog, request: Request) -> Iterator[Found]:
    """Every cluster that meets every constraint, one by one, by the rules as they are written down."""
    paper = request.objective == "flopp"
    exclusive = paper and request.policy in ("deepvm", "noscale")
    baseline = request.policy in ("cost-first", "performance-first")
    kinds = ("single-anchor",) if baseline else request.architectures_of(catalog)
    table = catalog.saturation == "table"
    expert = not (paper or table)
    usd = {market: {} for market in Market}
    for market, columns in catalog.prices.items():
        for i, p, price in zip(columns.instance, columns.place, columns.usd_per_hour, strict=True):
            if expert and price < bid_floor_usd(catalog.instances[i]):
                continue
            region, zone = catalog.places[p]
            zones = [q for q, (r, z) in enumerate(catalog.places) if r == region and z is not None]
            for q in [int(p)] if zone is not None or not zones else zones:  # a region's price holds in its zones
                usd[market][int(i), q] = min(float(price), usd[market].get((int(i), q), math.inf))
    if expert:  # nobody takes a spot machine for the price of one that stays
        on_demand_usd = usd[Market.ON_DEMAND]
        usd[Market.SPOT] = {at: x for at, x in usd[Market.SPOT].items() if x < on_demand_usd.get(at, math.inf)}
    board = analyse_instances(catalog, request)

    def quota(i: int, p: int, market: Market) -> float:
        instance, most = catalog.instances[i], math.inf
        for q in catalog.quotas:
            if q.market is market and instance.family in q.families and q.region in (None, catalog.places[p][0]):
                most = min(most, q.vcpus // instance.vcpus)
        if expert and instance.accelerator_count:
            most = min(most, max(1.0, MARKET_GPUS // instance.accelerator_count))
        return most - 1 if exclusive else most

    needed_gbps = request.checkpoint_bytes * 8 / request.checkpoint_every_s / 0.5 / 1e9
    bytes_wanted = request.checkpoint_bytes * request.buffers
    for i, instance in enumerate(catalog.instances):
        eflops, _ = eflops_of(instance)
        if instance.accelerator is None or eflops is None:
            continue
        for p in range(len(catalog.places)):
            spot, on_demand = usd[Market.SPOT].get((i, p)), usd[Market.ON_DEMAND].get((i, p))
            if spot is None and on_demand is None:
                continue
            curve = board.curve(i)
            uplink = math.inf if table else instance.sustained_gbps
            for n in range(1, request.max_nodes + 1):
                performance = eflops * n * float(curve.scaling(np.array([n]))[0])
                if math.isnan(performance) or performance < request.least_performance:
                    continue  # NaN: more GPUs than samples
                valued = spot is not None or not paper  # without a spot price there is no spot FLOPP
                if valued and "all-on-demand" in kinds and on_demand and n <= quota(i, p, Market.ON_DEMAND):
                    yield Found("all-on-demand", i, p, n, n * on_demand, performance)
                if spot is None:
                    continue
                spot_limit = quota(i, p, Market.SPOT)
                anchor_share = ANCHOR_SHARE if expert else 1.0
                if "all-spot" in kinds and n <= spot_limit and n * uplink >= needed_gbps:
                    yield Found("all-spot", i, p, n, n * spot, performance)
                anchor_spots = n if paper else n - 1
                if (
                    "single-anchor" in kinds
                    and n >= 2
                    and on_demand is not None
                    and anchor_spots <= spot_limit
                    and quota(i, p, Market.ON_DEMAND) >= 1
                    and (
                        paper
                        or instance.memory_gib is None
                        or instance.memory_gib * anchor_share * 2**30 >= bytes_wanted
                    )
                    and (paper or uplink >= needed_gbps)
                ):
                    yield Found("single-anchor", i, p, n, (n - 1) * spot + on_demand, performance)
                if "tiering" not in kinds or n > spot_limit or n * uplink < needed_gbps:
                    continue
                tiers: list[tuple[float, float]] = []  # what decides, and what is paid
                for (j, q), price in usd[Market.ON_DEMAND].items():
                    node = catalog.instances[j]
                    near = q == p if request.memory_in == "zone" else catalog.places[q][0] == catalog.places[p][0]
                    if node.accelerator is not None or not near or (expert and node.vcpus < 2):
                        continue
                    serving = 0
                    for m in range(1, request.max_nodes + 1):
                        each = node.memory_gib * USABLE_MEMORY - (OS_HEADROOM_GIB if expert else 0.0)
                        held = node.memory_gib * 2**30 if paper else m * each * 2**30
                        gbps = min(node.sustained_gbps, instance.sustained_gbps)
                        served = n / m < float(table_workers(gbps)) if table else m * node.sustained_gbps >= needed_gbps
                        fits = each > 0 and held >= bytes_wanted and served and m <= quota(j, q, Market.ON_DEMAND)
                        serving += fits
                        if not fits or (expert and serving > 1 and m > MOST_NODES):
                            continue
                        if not expert:
                            yield Found("tiering", i, p, n, n * spot + m * price, performance)
                            continue
                        gigabytes = request.checkpoint_bytes / 1e9
                        per_h = 3600 / request.checkpoint_every_s + request.losses_per_h * n
                        traffic = 0.0 if q == p else 0.02 * gigabytes * per_h
                        rates = (instance.sustained_gbps / 8, m * node.sustained_gbps / 8 / n, m * 2 * 5 / 8, 8.0)
                        waiting = request.losses_per_h * n * spot * gigabytes / min(rates) / 3600
                        paid = m * price + traffic
                        tiers.append((round(paid + NODE_USD * (m - 1) + waiting, 9), paid))
                if tiers:
                    yield Found("tiering", i, p, n, n * spot + min(tiers)[1], performance)


def objective_score(catalog: Catalog, request: Request, found: Found) -> float:
    """Higher is better."""
    instance = catalog.instances[found.worker]
    eflops = eflops_of(instance)[0] or 0.0
    performance = eflops * found.nodes if request.policy == "noscale" else found.performance
    if request.policy == "cost-first":
        return found.nodes
    if request.policy == "performance-first":
        return eflops * 1000 + found.nodes
    if request.objective == "throughput":
        return performance
    if request.objective == "time":
        return -request.work_eflops_h / performance
    if request.objective == "cost":
        return -request.work_eflops_h / performance * found.usd
    spot = catalog.prices[Market.SPOT]
    region, _ = catalog.places[found.place]
    here = [p for p, place in enumerate(catalog.places) if p == found.place or place == (region, None)]
    rows = (spot.instance == found.worker) & np.isin(spot.place, here)
    return performance / spot.usd_per_hour[rows].min() if rows.any() else 0.0
