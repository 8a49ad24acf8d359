"""Data-parallel training with an all-reduce: figures of a job, of machines and of a network in, speedup out.

The planner uses this formula for machines without measurements. Its three constants for TCP were fitted to measured
machines; those of EFA and of the links inside a machine are in ``cluster.interconnect``.
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


def allreduce_s(
    nodes: ArrayLike,
    *,
    gradient_bytes: ArrayLike,
    sustained_gbps: ArrayLike,
    latency_s: ArrayLike = DEFAULT_LATENCY_S,
    efficiency: ArrayLike = DEFAULT_EFFICIENCY,
    gpus: ArrayLike = 1.0,
    inside_gbytes_per_s: ArrayLike = np.inf,
    inside_latency_s: ArrayLike = 0.0,
) -> Floats:
    """Return the seconds of one all-reduce over ``nodes`` machines of ``gpus`` each. All arguments broadcast.

    Between n machines a ring sends 2(n-1)/n of the gradients at ``efficiency`` of the network, and pays ``latency_s``
    on each of its 2(n-1) hops. Inside, a ring of g GPUs sends 2(g-1)/g at ``inside_gbytes_per_s`` (one direction, as
    NCCL's bus bandwidth) with 2(g-1) hops. Libraries pipeline the two in chunks: the slower decides, the hops add up.

    An unknown (NaN) figure gives NaN, except where it is not needed: one machine has no network, one GPU no link.
    """
    n = node_counts(nodes)
    size, gbps, hop_s, usable, g, inside, inside_hop_s = (
        np.asarray(figure, dtype=np.float64)
        for figure in (
            gradient_bytes, sustained_gbps, latency_s, efficiency, gpus, inside_gbytes_per_s, inside_latency_s
        )
    )  # fmt: skip
    with np.errstate(over="ignore", invalid="ignore"):
        between_s = np.where(n == 1.0, 0.0, 2.0 * (n - 1.0) / n * (size * 8e-9 / gbps / usable))
        between_hops_s = np.where(n == 1.0, 0.0, 2.0 * (n - 1.0) * hop_s)
        inside_s = np.where(g <= 1.0, 0.0, 2.0 * (g - 1.0) / g * (size * 1e-9 / inside))
        inside_hops_s = np.where(g <= 1.0, 0.0, 2.0 * (g - 1.0) * inside_hop_s)
        return np.asarray(np.maximum(between_s, inside_s) + (between_hops_s + inside_hops_s))


def allreduce_speedup(
    nodes: ArrayLike,
    *,
    compute_s: ArrayLike,
    overlap: ArrayLike = DEFAULT_OVERLAP,
    **links: ArrayLike,
) -> Floats:
    """Return the speedup over one machine. All arguments broadcast: columns [V, 1] and nodes [N] give [V, N].

    A step takes t(n) = compute + max(0, comm(n) - overlap × compute), where comm(n) is ``allreduce_s`` with these
    ``links``. The batch per machine is constant, so n machines do n × t(1)/t(n) times the work of one.

    An unknown (NaN) figure gives NaN, except for one machine, which needs no network to be as fast as itself.
    """
    n = node_counts(nodes)
    one, many = _step_over_compute(1.0, compute_s, overlap, links), _step_over_compute(n, compute_s, overlap, links)
    with np.errstate(invalid="ignore"):
        speedup = n * one / many
    speedup = np.where(np.isinf(many), 0.0, speedup)  # links too slow for a float
    return np.where(n == 1.0, 1.0, speedup)


def compute_share(*, compute_s: ArrayLike, overlap: ArrayLike = DEFAULT_OVERLAP, **links: ArrayLike) -> Floats:
    """Return the share of a step on one machine that computes; its GPUs exchange gradients in the rest."""
    return np.asarray(1.0 / _step_over_compute(1.0, compute_s, overlap, links))


def _step_over_compute(
    nodes: ArrayLike, compute_s: ArrayLike, overlap: ArrayLike, links: Mapping[str, ArrayLike]
) -> Floats:
    compute, share = np.asarray(compute_s, dtype=np.float64), np.asarray(overlap, dtype=np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(1.0 + np.maximum(0.0, allreduce_s(nodes, **links) / compute - share))


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
