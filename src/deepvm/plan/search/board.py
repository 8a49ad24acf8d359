"""The board of stage 2: the market as columns in, scaling for every architecture out. ``tiers`` adds memory nodes.

A row of ``workers`` is a GPU type in a place; a row of ``memory`` is a CPU type in a place. Types left out are counted
by reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepvm.catalog import Catalog, Quota
from deepvm.json_fields import json_fields
from deepvm.performance import (
    DEFAULT_UTILISATION,
    AllReduce,
    ClusterAllReduce,
    LimitedBatch,
    SpeedupCurve,
    allreduce_speedup,
    compute_share,
    curve_from_spec,
    limited_scaling,
)
from deepvm.performance.cluster.interconnect import EFA, TCP
from deepvm.performance.eflops import T4_EFLOPS
from deepvm.plan.request import Request
from deepvm.plan.search.links import Links

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

GIB = 2**30
T4_MEMORY_GIB = 16.0
USABLE_MEMORY = 0.9  # of a memory node; the rest is fragments and buffers of the network
OS_HEADROOM_GIB = 1.0  # of a memory node besides: the operating system, Python, the page tables
ANCHOR_SHARE = 0.5  # of an anchor's memory: it trains too, and its loader and staging need the other half
MARKET_GPUS = 64  # of one type in a place: no public trace of a spot market has more than 16 machines


@dataclass(frozen=True, kw_only=True)
class Workers:
    """GPU types by place. Prices are inf if the market does not offer the type."""

    instance: Ints
    place: Ints
    site: Ints  # where its memory nodes must be: the place, or the region
    spot_usd: Floats
    on_demand_usd: Floats
    eflops: Floats  # of the machine: its GPUs' less what they need to exchange gradients inside
    gpu_eflops: Floats  # of one GPU alone
    gpus: Floats
    gpu_memory_gib: Floats
    inside_gbytes_per_s: Floats  # of an all-reduce between its GPUs
    inside_latency_s: Floats
    efa: NDArray[np.bool_]
    gbps: Floats
    memory_gib: Floats
    least_nodes: Floats  # machines on whose GPUs the job fits, with FSDP together
    spot_limit: Floats  # machines that the quotas admit; inf without a quota
    on_demand_limit: Floats

    def __len__(self) -> int:
        return len(self.instance)


@dataclass(frozen=True, kw_only=True)
class MemoryNodes:
    instance: Ints
    place: Ints
    site: Ints
    usd: Floats
    gbps: Floats
    memory_gib: Floats
    limit: Floats

    def __len__(self) -> int:
        return len(self.instance)


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    reason: str
    count: int
    example: str

    def to_json(self) -> dict[str, Any]:
        return json_fields(self, "reason count example")


@dataclass(frozen=True, kw_only=True)
class Board:
    """What the architectures need to know of the market, for one request."""

    catalog: Catalog
    request: Request
    saturation: str
    workers: Workers
    memory: MemoryNodes
    links: tuple[Links, ...]  # by catalogue instance
    eflops_estimated: NDArray[np.bool_]  # by catalogue instance
    gbps_estimated: NDArray[np.bool_]
    left_out: tuple[LeftOut, ...]

    @property
    def paper(self) -> bool:
        """True if the paper's own rules apply, and not those of an expert."""
        return follows_paper(self.request, self.saturation)

    @property
    def quotas(self) -> tuple[Quota, ...]:
        return self.request.quotas_of(self.catalog)

    @property
    def checkpoints_gib(self) -> float:
        """The memory that the tier or the anchor needs: checkpoint × buffers."""
        return self.request.checkpoint_bytes * self.request.buffers / GIB

    @property
    def checkpoint_gbps(self) -> float:
        """The bandwidth that checkpoints need, with room for other traffic."""
        if self.saturation == "table":
            return 0.0  # the table counts workers, not bytes
        return self.request.checkpoint_bytes * 8 / self.request.checkpoint_every_s / DEFAULT_UTILISATION / 1e9

    @property
    def network_model(self) -> str:
        if self.saturation == "table":
            return "saturation table of the paper"
        return f"bandwidth for a checkpoint every {self.request.checkpoint_every_s:g} s"

    def curve(self, instance: int, slowest_gbps: float = np.inf, *, efa: bool = True) -> SpeedupCurve:
        """Return a type's speedup curve: measured if the catalogue has one, else all-reduce.

        In a mixed cluster, a ring is as fast as its slowest link, and has EFA (``efa``) only if all its machines do."""
        spec = self._measured_spec(instance)
        row = np.flatnonzero(self.workers.instance == instance)[:1]
        curve = self._modelled(row, slowest_gbps, efa) if spec is None else curve_from_spec(spec)
        if self.request.global_batch is None:
            return curve
        return LimitedBatch(
            curve=curve.to_spec(),
            gpus=float(self.workers.gpus[row][0]),
            batch=float(self.full_batch(row)[0]),
            global_batch=self.request.global_batch,
            compute_share=float(self.compute_share(row)[0]),
        )

    def _modelled(self, row: Ints, slowest_gbps: float, efa: bool) -> SpeedupCurve:
        figures: dict[str, Any] = {
            name: float(np.broadcast_to(value, 1)[0])
            for name, value in {
                "compute_s": self.compute_s(row),
                **self._network(row, efa),
                **self._inside(row),
            }.items()
        }
        figures["sustained_gbps"] = min(figures["sustained_gbps"], slowest_gbps)
        if figures["gpus"] > 1:
            return ClusterAllReduce(**figures)
        return AllReduce(**{name: figures[name] for name in AllReduce.bounds if name in figures})

    def unmeasured_links(self, instance: int, *, efa: bool) -> tuple[str, ...]:
        """Name the links behind a type's curve whose figures come from data sheets; ``efa`` if its ring has EFA."""
        if self._measured_spec(instance) is not None:
            return ()
        links = self.links[instance]
        inside = [f"all-reduce over {links.inside.name}"] if links.gpus > 1 else []
        return (*inside, *(["all-reduce over EFA"] if efa else []))

    def _network(self, rows: Ints, efa: bool = True) -> dict[str, Floats | float]:
        with_efa = self.workers.efa[rows] & efa
        return {
            "gradient_bytes": self.request.gradient_bytes_per_step,
            "sustained_gbps": self.workers.gbps[rows],
            "latency_s": np.where(with_efa, EFA.latency_s, TCP.latency_s),
            "efficiency": np.where(with_efa, EFA.efficiency, TCP.efficiency),
        }

    def _inside(self, rows: Ints) -> dict[str, Floats]:
        names = ("gpus", "inside_gbytes_per_s", "inside_latency_s")
        return {name: getattr(self.workers, name)[rows] for name in names}

    def _measured_spec(self, instance: int) -> Mapping[str, Any] | None:
        if self.request.curve != "auto":
            return None
        one, ratings = self.catalog.instances[instance], self.request.ratings
        profiled = None if ratings is None else ratings.curve_spec(one.name)
        return one.speedup if profiled is None else profiled

    def scaling(self, nodes: Ints) -> Floats:
        """Return [row of workers, node count]: the factor of eFLOPS × n. NaN for more GPUs than samples."""
        types, first, inverse = np.unique(self.workers.instance, return_index=True, return_inverse=True)
        table = np.empty((len(types), len(nodes)))
        modelled = []
        for t, instance in enumerate(types):
            spec = self._measured_spec(instance)
            if spec is not None:
                table[t] = curve_from_spec(spec).scaling(nodes)
            else:
                modelled.append(t)
        if modelled:
            rows = first[modelled]
            figures = {"compute_s": self.compute_s(rows), **self._network(rows), **self._inside(rows)}
            columns = {name: np.broadcast_to(value, len(rows))[:, None] for name, value in figures.items()}
            table[modelled] = allreduce_speedup(nodes, **columns) / nodes
        if self.request.global_batch is not None:
            table = limited_scaling(
                table,
                gpus=self.workers.gpus[first][:, None] * nodes,
                batch=self.full_batch(first)[:, None],
                global_batch=self.request.global_batch,
                compute_share=self.compute_share(first)[:, None],
            )
        return np.asarray(table[inverse.reshape(-1)])

    def compute_s(self, rows: Ints) -> Floats:
        """Return the compute time of a step. Every accelerator has its own batch, as large as its memory admits."""
        return compute_s(self.request, self.workers.gpu_eflops[rows], self.workers.gpu_memory_gib[rows])

    def compute_share(self, rows: Ints) -> Floats:
        """Return the share of one machine's step that computes."""
        figures = {**self._network(rows), **self._inside(rows)}
        return compute_share(compute_s=self.compute_s(rows), **figures)

    def full_batch(self, rows: Ints) -> Floats:
        """Return the samples that fill the memory of one GPU; NaN if the request does not say what a T4 takes."""
        batch = np.nan if self.request.batch is None else self.request.batch
        return batch * self.workers.gpu_memory_gib[rows] / T4_MEMORY_GIB


def compute_s(request: Request, gpu_eflops: Floats, gpu_memory_gib: Floats) -> Floats:
    return np.asarray(request.step_s * (gpu_memory_gib / T4_MEMORY_GIB) * T4_EFLOPS / gpu_eflops)


def follows_paper(request: Request, saturation: str) -> bool:
    """True if the paper's own rules apply: for its objective, and for catalogues of its table."""
    return request.published or saturation == "table"


def market_gpus(request: Request, saturation: str) -> float:
    """Return the most GPUs of one type that a market is expected to have in one place."""
    if request.market_gpus is not None:
        return float(request.market_gpus)
    return np.inf if follows_paper(request, saturation) else float(MARKET_GPUS)


def usable_gib(memory_gib: Any) -> Any:
    """Return what a memory node has for checkpoints, beside its operating system."""
    return memory_gib * USABLE_MEMORY - OS_HEADROOM_GIB
