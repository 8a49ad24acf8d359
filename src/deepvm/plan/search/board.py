"""The board of stage 2: the market as columns in, scaling and memory tiers for every architecture out.

A row of ``workers`` is a GPU type in a place; a row of ``memory`` is a CPU type in a place. Types left out are counted
by reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepvm.catalog import Catalog, Quota
from deepvm.json_fields import json_fields
from deepvm.performance import (
    DEFAULT_UTILISATION,
    AllReduce,
    SpeedupCurve,
    allreduce_speedup,
    bandwidth_memory_nodes,
    curve_from_spec,
    table_memory_nodes,
)
from deepvm.performance.eflops import T4_EFLOPS
from deepvm.plan.request import Request

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

GIB = 2**30
T4_MEMORY_GIB = 16.0
USABLE_MEMORY = 0.9  # of a memory node; the rest is the system's


@dataclass(frozen=True, kw_only=True)
class Workers:
    """GPU types by place. Prices are inf if the market does not offer the type."""

    instance: Ints
    place: Ints
    site: Ints  # where its memory nodes must be: the place, or the region
    spot_usd: Floats
    on_demand_usd: Floats
    eflops: Floats
    gbps: Floats
    memory_gib: Floats
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
    eflops_estimated: NDArray[np.bool_]  # by catalogue instance
    gbps_estimated: NDArray[np.bool_]
    left_out: tuple[LeftOut, ...]

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

    def curve(self, instance: int, slowest_gbps: float = np.inf) -> SpeedupCurve:
        """Return a type's speedup curve: measured if the catalogue has one, else all-reduce.

        In a mixed cluster, a ring is as fast as its slowest link."""
        spec = self._measured_spec(instance)
        if spec is not None:
            return curve_from_spec(spec)
        row = int(np.flatnonzero(self.workers.instance == instance)[0])
        return AllReduce(
            compute_s=float(self.compute_s(np.array([row]))[0]),
            gradient_bytes=self.request.gradient_bytes_per_step,
            sustained_gbps=min(float(self.workers.gbps[row]), slowest_gbps),
        )

    def _measured_spec(self, instance: int) -> Mapping[str, Any] | None:
        return self.catalog.instances[instance].speedup if self.request.curve == "auto" else None

    def scaling(self, nodes: Ints) -> Floats:
        """Return [row of workers, node count]: the factor of eFLOPS × n."""
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
            speedup = allreduce_speedup(
                nodes,
                compute_s=self.compute_s(rows)[:, None],
                gradient_bytes=self.request.gradient_bytes_per_step,
                sustained_gbps=self.workers.gbps[rows][:, None],
            )
            table[modelled] = speedup / nodes
        return np.asarray(table[inverse.reshape(-1)])

    def compute_s(self, rows: Ints) -> Floats:
        """Return the compute time of a step. Every accelerator has its own batch, as large as its memory admits."""
        seconds = np.empty(len(rows))
        for i, row in enumerate(rows):
            instance = self.catalog.instances[self.workers.instance[row]]
            eflops_each = self.workers.eflops[row] / max(instance.accelerator_count, 1.0)
            batch = (instance.accelerator_memory_gib or T4_MEMORY_GIB) / T4_MEMORY_GIB
            seconds[i] = self.request.step_s * batch * T4_EFLOPS / eflops_each
        return seconds

    # --- the memory tier ---------------------------------------------------------------------------------------

    @cached_property
    def tier_memory_nodes(self) -> Floats:
        """[row of memory]: the nodes needed for the bytes alone, checkpoint × buffers."""
        wanted_gib = self.checkpoints_gib
        if self.request.published:  # every node holds all of it, in all its memory
            return np.where(self.memory.memory_gib >= wanted_gib, 1.0, np.inf)
        return np.maximum(1.0, np.ceil(wanted_gib / (self.memory.memory_gib * USABLE_MEMORY)))

    def tier_counts(self, rows: Ints, worker_gbps: float, nodes: Ints) -> Floats:
        """Return [rows of memory, node count]: the fewest memory nodes that serve these workers."""
        shape = (len(rows), len(nodes))
        if self.saturation == "table":
            slower = np.minimum(self.memory.gbps[rows], worker_gbps)[:, None]
            serve = table_memory_nodes(nodes, slower)
        else:
            serve = bandwidth_memory_nodes(
                self.request.checkpoint_bytes, self.request.checkpoint_every_s, self.memory.gbps[rows]
            )[:, None]
        return np.broadcast_to(np.maximum(serve, self.tier_memory_nodes[rows][:, None]), shape)

    def tier_usd(self, rows: Ints, worker_gbps: float, nodes: Ints) -> Floats:
        """Return [rows of memory, node count]: the price of that tier, inf if a quota or the node limit forbids it."""
        counts = self.tier_counts(rows, worker_gbps, nodes)
        allowed = counts <= np.minimum(self.memory.limit[rows], self.request.max_nodes)[:, None]
        return np.asarray(np.where(allowed, counts, np.inf) * self.memory.usd[rows][:, None])

    def cheapest_tier_usd(self, nodes: Ints) -> Floats:
        """Return [row of workers, node count]: the price of the cheapest memory tier at each worker row's site."""
        result = np.full((len(self.workers), len(nodes)), np.inf)
        by_site = _rows_by_value(self.memory.site)
        by_gbps = self.saturation == "table"
        if not by_gbps:  # the bandwidth model counts bytes, not workers: one node count serves for all
            nodes = nodes[:1]
        keys = np.stack([self.workers.site, self.workers.gbps if by_gbps else np.zeros(len(self.workers))], axis=1)
        for site, gbps in np.unique(keys, axis=0):
            rows = by_site.get(int(site))
            if rows is not None:
                cheapest = self.tier_usd(rows, gbps, nodes).min(axis=0)
                result[(keys[:, 0] == site) & (keys[:, 1] == gbps)] = cheapest
        return result

    def tiers(self, worker: int, nodes: int, limit: int) -> list[tuple[int, int]]:
        """List the cheapest memory tiers for one cluster: (row of memory, count), cheapest first."""
        rows = np.flatnonzero(self.memory.site == self.workers.site[worker])
        count = np.array([nodes])
        gbps = float(self.workers.gbps[worker])
        usd = self.tier_usd(rows, gbps, count)[:, 0]
        counts = self.tier_counts(rows, gbps, count)[:, 0]
        order = np.lexsort((rows, counts, usd))[:limit]
        return [(int(rows[i]), int(counts[i])) for i in order if np.isfinite(usd[i])]


def _rows_by_value(column: Ints) -> dict[int, Ints]:
    order = np.argsort(column, kind="stable")
    values, counts = np.unique(column, return_counts=True)
    ends = np.cumsum(counts)
    return {int(v): order[end - n : end] for v, n, end in zip(values, counts, ends, strict=True)}
