"""Requests, catalogues and traces for plans under a spot market."""

from __future__ import annotations

import numpy as np

from deepvm.catalog import Catalog, Instance
from deepvm.market.trace import Trace, TraceKind
from deepvm.plan import Request
from tests.support.small_markets import small_catalog

WORK = 24 * 377.0  # a day on one machine
DUE_S = 14 * 3600.0


def gpu(name: str, eflops: float = 377.0, accelerator: str = "V100") -> Instance:
    return Instance(
        name=name, family="G", vcpus=4, memory_gib=64.0, accelerator=accelerator, accelerator_count=1,
        accelerator_memory_gib=16.0, eflops=eflops, sustained_gbps=10.0,
        speedup={"model": "logistic", "a": 0.09, "b": 3.0, "c": 2.0},
    )  # fmt: skip


def cpu(name: str) -> Instance:
    return Instance(name=name, family="C", vcpus=4, memory_gib=16.0, sustained_gbps=10.0)


def small(spot: float = 0.3, *, places: tuple[tuple[str, str | None], ...] = (("r-1", None),)) -> Catalog:
    """Two types of workers and one of memory nodes, everywhere."""
    at = range(len(places))
    machines = [gpu("slow"), gpu("fast", 900.0, "H100"), cpu("node")]
    on_demand = [(i, p, usd) for i, usd in ((0, 1.0), (1, 3.0), (2, 0.1)) for p in at]
    return small_catalog(
        machines, on_demand, [(0, p, spot * (1 + p / 10)) for p in at] + [(1, p, 3 * spot) for p in at], places=places
    )


def request(**wanted: object) -> Request:
    given: dict[str, object] = {"budget_usd": 4.0, "objective": "cost", "work_eflops_h": WORK, "max_nodes": 4}
    return Request(**{**given, **wanted})  # type: ignore[arg-type]


def traces(
    up: list[int], *, zones: int = 1, accelerator: str = "V100", machines: int = 16
) -> dict[str, tuple[Trace, ...]]:
    return {
        "set": tuple(
            Trace(
                zone=f"z{i}", machines=machines, gap_s=600.0, up=np.array(up, np.int32), kind=TraceKind.LAUNCH,
                accelerator=accelerator,
            )
            for i in range(zones)
        )
    }  # fmt: skip
