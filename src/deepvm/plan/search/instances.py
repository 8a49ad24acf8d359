"""Stage 2, instance-level analysis: catalogue and request in, a board of rated machines out.

Types left out are counted by reason.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deepvm.catalog import Catalog, Instance, Market, Quota, binding_quotas
from deepvm.catalog.accelerators import find as find_accelerator
from deepvm.catalog.check import bid_floor_usd
from deepvm.catalog.clouds.zones import is_local
from deepvm.catalog.model import Prices
from deepvm.catalog.sources.aws_network import sustained_by_family
from deepvm.errors import UnknownName
from deepvm.performance import compute_share, estimate_eflops, estimate_sustained_gbps
from deepvm.performance.cluster.interconnect import PCIE
from deepvm.plan.profiles import Ratings
from deepvm.plan.request import Request
from deepvm.plan.search.board import (
    T4_MEMORY_GIB,
    Board,
    Floats,
    Ints,
    LeftOut,
    MemoryNodes,
    Workers,
    compute_s,
    follows_paper,
    market_gpus,
)
from deepvm.plan.search.fitness import Fitness
from deepvm.plan.search.links import Links, links_of

Bools = NDArray[np.bool_]
LOCAL_ZONE = "a local zone, with few machines (--local-zones admits it)"
BID_FLOOR = "a bid floor instead of a price"
DEAR_SPOT = "no spot price below on-demand"


def analyse_instances(catalog: Catalog, request: Request) -> Board:
    """Find the machines for each role, rate them, and count what was left out by reason."""
    return _Analysis(catalog, request).board()


def eflops_of(instance: Instance, ratings: Ratings | None = None) -> tuple[float | None, bool]:
    """Return a machine's eFLOPS, and True if it is an estimate; None for an unknown accelerator.

    Profiles come first: what was measured, and then what a roofline of measured machines estimates."""
    rated = None if ratings is None else ratings.eflops_of(instance)
    if rated is not None:
        return rated
    if instance.eflops is not None:
        return instance.eflops, False
    accelerator = None if instance.accelerator is None else find_accelerator(instance.accelerator)
    if accelerator is None:
        return None, False
    eflops = estimate_eflops(
        tflops_16bit=accelerator.tflops_16bit,
        memory_gbytes_per_s=accelerator.memory_gbytes_per_s,
        count=instance.accelerator_count,
    )
    return eflops, True


def job_eflops(instance: Instance, provider: str, request: Request) -> float | None:
    """Return a machine's eFLOPS for a job: an estimate less what its GPUs need to exchange the job's gradients."""
    eflops, estimated = eflops_of(instance, request.ratings)
    if eflops is None or not estimated:
        return eflops
    links = links_of(instance, provider)
    memory_gib = np.asarray(instance.accelerator_memory_gib or T4_MEMORY_GIB)
    share = compute_share(
        compute_s=compute_s(request, np.asarray(eflops / links.gpus), memory_gib),
        gradient_bytes=request.gradient_bytes_per_step,
        sustained_gbps=np.nan,  # one machine needs none
        gpus=links.gpus,
        inside_gbytes_per_s=links.inside_gbytes_per_s,
        inside_latency_s=links.inside.latency_s,
    )
    return eflops * float(share)


class _Analysis:
    def __init__(self, catalog: Catalog, request: Request) -> None:
        self.catalog, self.request = catalog, request
        self.quotas = request.quotas_of(catalog)
        self.saturation = catalog.saturation if request.saturation == "auto" else request.saturation
        count = len(catalog.instances)
        self.eflops, self.gbps = np.full(count, np.nan), np.full(count, np.nan)
        self.eflops_estimated, self.gbps_estimated = np.zeros(count, bool), np.zeros(count, bool)
        self.reasons: dict[str, list[str]] = {}
        self.regions = catalog.region_of_place
        self.paper = follows_paper(request, self.saturation)
        self._check_names()
        self.fitness = Fitness(catalog, request, paper=self.paper)

    def board(self) -> Board:
        is_worker, is_memory = self._roles()
        places = self._allowed_places()
        usd = {market: self._price_table(market, places, is_worker) for market in Market}
        if not self.paper:
            self._drop_dear_spot(usd, is_worker)
        offered = np.isfinite(usd[Market.SPOT]) | np.isfinite(usd[Market.ON_DEMAND])
        for i in np.flatnonzero(is_worker & ~offered.any(axis=1)):
            if self.catalog.instances[i].name not in self.reasons.get(BID_FLOOR, ()):
                self._leave_out(self.catalog.instances[i], "no price in the places asked for")
        instance, place = np.nonzero(offered & is_worker[:, None])
        memory_instance, memory_place = np.nonzero(np.isfinite(usd[Market.ON_DEMAND]) & is_memory[:, None])
        site = self._sites()
        limits = {market: self._limits(market) for market in Market}
        gib = np.array([i.memory_gib or np.nan for i in self.catalog.instances])
        links = self._links()
        gpus = np.array([link.gpus for link in links])
        gpu_memory_gib = np.array([i.accelerator_memory_gib or T4_MEMORY_GIB for i in self.catalog.instances])
        inside_gbytes_per_s = np.array([link.inside_gbytes_per_s for link in links])
        inside_latency_s = np.array([link.inside.latency_s for link in links])
        inside_share = compute_share(
            compute_s=compute_s(self.request, self.eflops / gpus, gpu_memory_gib),
            gradient_bytes=self.request.gradient_bytes_per_step,
            sustained_gbps=self.gbps,
            gpus=gpus,
            inside_gbytes_per_s=inside_gbytes_per_s,
            inside_latency_s=inside_latency_s,
        )
        # A measured machine was measured with its exchange of gradients.
        eflops = np.where(self.eflops_estimated, self.eflops * inside_share, self.eflops)
        workers = Workers(
            instance=instance,
            place=place,
            site=site[place],
            spot_usd=usd[Market.SPOT][instance, place],
            on_demand_usd=usd[Market.ON_DEMAND][instance, place],
            eflops=eflops[instance],
            gpu_eflops=(self.eflops / gpus)[instance],
            gpus=gpus[instance],
            gpu_memory_gib=gpu_memory_gib[instance],
            inside_gbytes_per_s=inside_gbytes_per_s[instance],
            inside_latency_s=inside_latency_s[instance],
            efa=np.array([link.efa for link in links], dtype=bool)[instance],
            gbps=self.gbps[instance],
            memory_gib=gib[instance],
            least_nodes=np.array([self.fitness.least_nodes(i) for i in self.catalog.instances])[instance],
            spot_limit=limits[Market.SPOT][instance, place],
            on_demand_limit=limits[Market.ON_DEMAND][instance, place],
        )
        memory = MemoryNodes(
            instance=memory_instance,
            place=memory_place,
            site=site[memory_place],
            usd=usd[Market.ON_DEMAND][memory_instance, memory_place],
            gbps=self.gbps[memory_instance],
            memory_gib=gib[memory_instance],
            limit=limits[Market.ON_DEMAND][memory_instance, memory_place],
        )
        return Board(
            catalog=self.catalog,
            request=self.request,
            saturation=self.saturation,
            workers=workers,
            memory=memory,
            links=links,
            eflops_estimated=self.eflops_estimated,
            gbps_estimated=self.gbps_estimated,
            left_out=tuple(
                LeftOut(reason=reason, count=len(names), example=names[0])
                for reason, names in sorted(self.reasons.items(), key=lambda item: -len(item[1]))
            ),
        )

    def _links(self) -> tuple[Links, ...]:
        without_gpu = Links(gpus=1.0, inside=PCIE, inside_gbytes_per_s=np.inf, efa=False)
        cloud_of = self.catalog.cloud_of
        return tuple(links_of(i, cloud_of(i)) if i.accelerator else without_gpu for i in self.catalog.instances)

    def _check_names(self) -> None:
        request, catalog = self.request, self.catalog
        for kind, asked, known in (
            ("region", request.regions, catalog.regions),
            ("zone", request.zones, catalog.zones),
        ):
            for name in asked:
                if name not in known:
                    raise UnknownName(f"{kind} of this catalogue", name, known)

    def _roles(self) -> tuple[Bools, Bools]:
        is_worker = np.zeros(len(self.catalog.instances), bool)
        is_memory = np.zeros(len(self.catalog.instances), bool)
        for i, instance in enumerate(self.catalog.instances):
            if self.request.cpu not in ("any", instance.architecture or "x86_64"):  # unknown counts as x86
                actual = f"{instance.architecture} machine" if instance.architecture else "CPU architecture unknown"
                self._leave_out(instance, f"{actual}, {self.request.cpu} asked for")
                continue
            self._rate(i, instance)
            if instance.accelerator:
                reason = self.fitness.worker(instance, self.eflops[i], self.gbps[i])
            else:
                reason = self.fitness.memory(instance, self.gbps[i])
            if reason:
                self._leave_out(instance, reason)
            elif instance.accelerator:
                is_worker[i] = True
            else:
                is_memory[i] = True
        return is_worker, is_memory

    def _rate(self, i: int, instance: Instance) -> None:
        """Set eFLOPS and bandwidth: measured, else estimated and marked, else missing."""
        eflops, self.eflops_estimated[i] = eflops_of(instance, self.request.ratings)
        self.eflops[i] = np.nan if eflops is None else eflops
        gbps, self.gbps_estimated[i] = self._gbps(instance)
        self.gbps[i] = np.nan if gbps is None else gbps

    def _gbps(self, instance: Instance) -> tuple[float | None, bool]:
        """Return a machine's bandwidth, and True if it is an estimate: sustained, for bursts end after minutes."""
        if self.saturation == "table" and instance.burst_gbps:
            return instance.burst_gbps, False  # the paper's table has advertised bandwidths
        if instance.sustained_gbps is not None:
            return instance.sustained_gbps, False
        aws = self.catalog.cloud_of(instance) == "aws"
        estimate = sustained_by_family(instance.name, instance.vcpus) if aws else None
        if instance.burst_gbps is not None:  # of other clouds, the only figure there is
            return (instance.burst_gbps, False) if estimate is None else (min(estimate, instance.burst_gbps), True)
        if estimate is None and instance.vcpus is not None:
            estimate = float(estimate_sustained_gbps(instance.vcpus))
        return estimate, estimate is not None

    def _leave_out(self, instance: Instance, reason: str) -> None:
        self.reasons.setdefault(reason, []).append(instance.name)

    def _allowed_places(self) -> Bools:
        catalog, regions, zones = self.catalog, self.request.regions or self.catalog.regions, self.request.zones
        allowed = np.array([r in regions and (not zones or z in zones) for r, z in catalog.places], dtype=bool)
        if not (self.paper or self.request.local_zones or zones):
            local = np.array([is_local(catalog.cloud_at(p), zone) for p, (_, zone) in enumerate(catalog.places)], bool)
            for p in np.flatnonzero(allowed & local):
                self.reasons.setdefault(LOCAL_ZONE, []).append(catalog.places[p][1] or "")
            allowed &= ~local
        return allowed

    def _without_bid_floors(self, prices: Prices, allowed: Bools, is_worker: Bools) -> Bools:
        """Return the rows with prices that a market can have: nobody gets machines for the lowest admitted bid."""
        floor = np.array([bid_floor_usd(instance) for instance in self.catalog.instances])
        real = np.asarray(prices.usd_per_hour >= floor[prices.instance])
        asked_for = np.isin(self.regions, self.regions[allowed])[prices.place]
        for i in np.unique(prices.instance[~real & asked_for]):
            name = self.catalog.instances[i].name
            if is_worker[i] and name not in self.reasons.get(BID_FLOOR, ()):
                self.reasons.setdefault(BID_FLOOR, []).append(name)
        return real

    def _drop_dear_spot(self, usd: dict[Market, Floats], is_worker: Bools) -> None:
        """Remove spot prices that are not below on-demand: who pays as much takes the machine that stays."""
        spot = usd[Market.SPOT]
        dear = np.isfinite(spot) & (spot >= usd[Market.ON_DEMAND])
        spot[dear] = np.inf
        for i in np.flatnonzero(dear.any(axis=1) & ~np.isfinite(spot).any(axis=1) & is_worker):
            self._leave_out(self.catalog.instances[i], DEAR_SPOT)

    def _price_table(self, market: Market, allowed: Bools, is_worker: Bools) -> Floats:
        """Return [instance, place]: USD an hour of the cheapest offer, inf without one."""
        table = np.full((len(self.catalog.instances), len(self.catalog.places)), np.inf)
        prices = self.catalog.prices.get(market)
        if prices is not None:
            rows = ... if self.paper else self._without_bid_floors(prices, allowed, is_worker)
            np.minimum.at(table, (prices.instance[rows], prices.place[rows]), prices.usd_per_hour[rows])
        of_region: dict[int, list[int]] = {}
        for p, (_, zone) in enumerate(self.catalog.places):
            if zone is not None:
                of_region.setdefault(int(self.regions[p]), []).append(p)
        for general, (_, zone) in enumerate(self.catalog.places):  # a price of a region is valid in each of its zones
            zones = of_region.get(int(self.regions[general]), []) if zone is None else []
            if zones:
                table[:, zones] = np.minimum(table[:, zones], table[:, [general]])
                table[:, general] = np.inf
        table[:, ~allowed] = np.inf
        return table

    def _sites(self) -> Ints:
        return np.arange(len(self.catalog.places)) if self.request.memory_in == "zone" else self.regions

    def _limits(self, market: Market) -> Floats:
        """Return [instance, place]: the machines that the quotas admit, and that a place is expected to have."""
        catalog = self.catalog
        limits = np.full((len(catalog.instances), len(catalog.places)), np.inf)
        most_gpus = market_gpus(self.request, self.saturation)
        if np.isfinite(most_gpus):
            gpus = np.array([i.accelerator_count for i in catalog.instances])
            with_gpus = gpus > 0
            most = most_gpus // np.maximum(1.0, gpus[with_gpus])
            if self.request.market_gpus is None:  # an expectation, and not a limit: what is sold is there at least once
                most = np.maximum(1.0, most)
            limits[with_gpus] = most[:, None]
        with_own = {q.region for q in self.quotas if q.region is not None} & set(catalog.regions)
        for region in ("", *with_own) if self.quotas else ():  # "" means all regions without their own quotas
            at = np.array([(own if own in with_own else "") == region for own, _ in catalog.places])
            for i, instance in enumerate(catalog.instances):
                if instance.vcpus is not None:
                    for quota in binding_quotas(self.quotas, instance, market, region):
                        limits[i, at] = np.minimum(limits[i, at], self._admitted(quota, instance.vcpus))
        return limits

    def _admitted(self, quota: Quota, vcpus: float) -> float:
        machines = (quota.vcpus + 1e-9) // vcpus
        if self.request.published and self.request.policy in ("deepvm", "noscale"):
            return machines - 1  # the published search ends one machine before the quota
        return machines
