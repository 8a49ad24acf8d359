"""Data-parallel training with a ring all-reduce: figures of a job and a network in, speedup out.

The planner uses this curve for machines without measurements. Its three constants for the network were fitted to
measured machines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from deepvm.performance.checks import Floats, ParametricCurve, node_counts

# One fit to 18 measured epochs of ResNet-18 on CIFAR-10 over 2 to 32 nodes of g4dn.xlarge (5 Gbit/s
# sustained) and g5.xlarge (2.5): 0.571, 7.5 ms and 0. The times that it gives are within 14 % of all of
# g4dn's and 20 % of all of g5's, and within 25 % of those of g3s.xlarge (10 Gbit/s advertised), which was
# not in the fit.
DEFAULT_EFFICIENCY = 0.57  # of the sustained bandwidth
# Far above the tenth of a millisecond of a packet: it stands for all that each further node adds to a step,
# such as stragglers and the fixed costs of an epoch. Measurements by node count cannot separate these.
DEFAULT_LATENCY_S = 0.0075
# Fitted alone, g4dn hides 0.56 of its compute time and g5 all of it, but no common share explains both better
# than none; and a plan that counts on no overlap errs towards fewer machines.
DEFAULT_OVERLAP = 0.0


def allreduce_speedup(
    nodes: ArrayLike,
    *,
    compute_s: ArrayLike,
    gradient_bytes: ArrayLike,
    sustained_gbps: ArrayLike,
    latency_s: ArrayLike = DEFAULT_LATENCY_S,
    overlap: ArrayLike = DEFAULT_OVERLAP,
    efficiency: ArrayLike = DEFAULT_EFFICIENCY,
) -> Floats:
    """Return the speedup over one machine. All arguments broadcast: columns [V, 1] and nodes [N] give [V, N].

    A step takes t(n) = compute + max(0, comm(n) - overlap × compute), where comm(n) sends 2(n-1)/n of the
    gradients at ``efficiency`` of the bandwidth and pays ``latency_s`` on each of the ring's 2(n-1) hops. The
    batch per machine is constant, so n machines do n × t(1)/t(n) times the work of one.

    An unknown (NaN) figure gives NaN, except for one machine, which needs no network to be as fast as itself.
    """
    n = node_counts(nodes)
    compute, size, gbps, hop_s, share, usable = (
        np.asarray(figure, dtype=np.float64)
        for figure in (compute_s, gradient_bytes, sustained_gbps, latency_s, overlap, efficiency)
    )
    with np.errstate(over="ignore", invalid="ignore"):  # a network too slow for a float has a speedup of 0
        ring_s = size * 8e-9 / gbps / usable
        comm_s = 2.0 * (n - 1.0) / n * ring_s + 2.0 * (n - 1.0) * hop_s
        speedup = n / (1.0 + np.maximum(0.0, comm_s / compute - share))
    return np.where(n == 1.0, 1.0, speedup)


@dataclass(frozen=True, kw_only=True, slots=True)
class AllReduce(ParametricCurve):
    """``allreduce_speedup`` for one job on one machine type. ``compute_s`` is one step on one machine."""

    model: ClassVar[str] = "all-reduce"
    bounds: ClassVar[Mapping[str, Mapping[str, float]]] = {
        "compute_s": {"above": 0},
        "gradient_bytes": {"at_least": 0},
        "sustained_gbps": {"above": 0},
        "latency_s": {"at_least": 0},
        "overlap": {"at_least": 0, "at_most": 1},
        "efficiency": {"above": 0, "at_most": 1},
    }

    compute_s: float
    gradient_bytes: float
    sustained_gbps: float
    latency_s: float = DEFAULT_LATENCY_S
    overlap: float = DEFAULT_OVERLAP
    efficiency: float = DEFAULT_EFFICIENCY
    measured: tuple[int, int] | None = None

    def speedup(self, nodes: ArrayLike) -> Floats:
        return allreduce_speedup(nodes, **self.parameters())

    def scaling(self, nodes: ArrayLike) -> Floats:
        return self.speedup(nodes) / node_counts(nodes)
