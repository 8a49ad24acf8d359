"""The links of GPU clusters: data-sheet figures in; usable bandwidth, latency and a speedup curve out.

NVLink, PCIe and EFA are three different all-reduces. Bandwidths here are one direction, in GB/s, as NCCL's tests report
"bus bandwidth". Nothing here was measured by this project: each constant names the published measurement behind it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from numpy.typing import ArrayLike

from deepvm.performance.allreduce import (
    DEFAULT_EFFICIENCY,
    DEFAULT_LATENCY_S,
    DEFAULT_OVERLAP,
    AllReduce,
    allreduce_speedup,
)
from deepvm.performance.checks import Floats, ParametricCurve, check_number, node_counts


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkKind:
    """How much of a data sheet's bandwidth an all-reduce gets, and what each hop of its ring costs."""

    name: str  # for people
    efficiency: float
    latency_s: float


# 8 × A100: 230.8 GB/s of 300 in one direction (nccl-tests on p4d.24xlarge, 1 GiB, github.com/NVIDIA/nccl/issues/527).
# Switches that add up by themselves (NVLink SHARP, from H100 on) reach more: about 450 of 450 is reported. 8 bytes
# take 13.8 µs on one p3dn.24xlarge with 8 × V100 (14 hops; nccl-tests, 2019).
NVLINK = LinkKind(name="NVLink", efficiency=0.77, latency_s=1e-6)
# No published figure at hand; as NVLink.
INFINITY_FABRIC = LinkKind(name="Infinity Fabric", efficiency=0.77, latency_s=1e-6)
# 8 × RTX 5090 on PCIe 5: 28 GB/s of 64 (nccl/issues/1639), through the CPUs, as in clouds. Cards behind one switch with
# peer access reach 0.8 (4 × RTX 4090: 26 of 32). 8 bytes take 41 µs over 8 × RTX 4090 (nccl/issues/1530).
PCIE = LinkKind(name="PCIe", efficiency=0.44, latency_s=3e-6)
# 1 GiB over 2, 3 and 4 p4d.24xlarge (400 Gbit/s) took 35, 65 and 70 ms in 2022 (nccl/issues/527): 0.61, 0.44 and 0.46
# of the network by ``allreduce_s``. Today's software is reported at about 40 GB/s on p4d and 350 on p5: 0.8 and 0.88.
# Eight bytes over 2, 4 and 8 p3dn.24xlarge took 163, 319 and 631 µs in 2019 (gist.github.com/jacobkahn): 75, 51 and
# 44 µs a hop; over 2 p6-b200.48xlarge 55 µs in 2026 (github.com/dstackai/dstack/pull/3961): 20 µs a hop.
EFA = LinkKind(name="EFA", efficiency=0.6, latency_s=45e-6)
# Fitted by this project to measured epochs: see ``allreduce``.
TCP = LinkKind(name="TCP", efficiency=DEFAULT_EFFICIENCY, latency_s=DEFAULT_LATENCY_S)

INSIDE: Mapping[str, LinkKind] = {"nvlink": NVLINK, "infinity-fabric": INFINITY_FABRIC, "pcie": PCIE}


def inside_gbytes_per_s(kind: LinkKind, data_sheet_gbytes_per_s: float) -> float:
    """Return what a ring inside a machine gets of a link, of which data sheets add up both directions."""
    check_number("data_sheet_gbytes_per_s", data_sheet_gbytes_per_s, above=0)
    return data_sheet_gbytes_per_s / 2 * kind.efficiency


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterAllReduce(ParametricCurve):
    """``allreduce_speedup`` for machines of several GPUs. ``compute_s`` is one step on one GPU without any exchange.

    The speedup is over one machine, whose GPUs already exchange gradients."""

    model: ClassVar[str] = "cluster-all-reduce"
    bounds: ClassVar[Mapping[str, Mapping[str, float]]] = {
        **AllReduce.bounds,
        "gpus": {"at_least": 1},
        "inside_gbytes_per_s": {"above": 0},
        "inside_latency_s": {"at_least": 0},
    }

    compute_s: float
    gradient_bytes: float
    gpus: float
    inside_gbytes_per_s: float
    sustained_gbps: float
    inside_latency_s: float = PCIE.latency_s
    latency_s: float = DEFAULT_LATENCY_S
    overlap: float = DEFAULT_OVERLAP
    efficiency: float = DEFAULT_EFFICIENCY
    measured: tuple[int, int] | None = None

    def speedup(self, nodes: ArrayLike) -> Floats:
        return allreduce_speedup(nodes, **self.parameters())

    def scaling(self, nodes: ArrayLike) -> Floats:
        return self.speedup(nodes) / node_counts(nodes)
