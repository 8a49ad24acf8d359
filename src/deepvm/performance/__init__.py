"""Machines and measurements in; eFLOPS, speedup curves, memory-node counts and restore times out. For the planner."""

from deepvm.performance.allreduce import (
    DEFAULT_EFFICIENCY,
    DEFAULT_LATENCY_S,
    DEFAULT_OVERLAP,
    AllReduce,
    allreduce_s,
    allreduce_speedup,
    compute_share,
)
from deepvm.performance.cluster.batch import FIXED_STEP_SHARE, LimitedBatch, limited_scaling
from deepvm.performance.cluster.interconnect import ClusterAllReduce, LinkKind, inside_gbytes_per_s
from deepvm.performance.curves import (
    MODELS,
    Logistic,
    MeasuredPoints,
    SpeedupCurve,
    UniversalScalability,
    curve_from_spec,
)
from deepvm.performance.eflops import estimate_eflops
from deepvm.performance.fit import Fit, fit
from deepvm.performance.network.saturation import (
    DEFAULT_UTILISATION,
    bandwidth_memory_nodes,
    estimate_sustained_gbps,
    table_memory_nodes,
    table_workers,
)
from deepvm.performance.restore import RestorePath, RestoreTime, restore_s, restore_time

__all__ = [
    "DEFAULT_EFFICIENCY",
    "DEFAULT_LATENCY_S",
    "DEFAULT_OVERLAP",
    "DEFAULT_UTILISATION",
    "FIXED_STEP_SHARE",
    "MODELS",
    "AllReduce",
    "ClusterAllReduce",
    "Fit",
    "LimitedBatch",
    "LinkKind",
    "Logistic",
    "MeasuredPoints",
    "RestorePath",
    "RestoreTime",
    "SpeedupCurve",
    "UniversalScalability",
    "allreduce_s",
    "allreduce_speedup",
    "bandwidth_memory_nodes",
    "compute_share",
    "curve_from_spec",
    "estimate_eflops",
    "estimate_sustained_gbps",
    "fit",
    "inside_gbytes_per_s",
    "limited_scaling",
    "restore_s",
    "restore_time",
    "table_memory_nodes",
    "table_workers",
]
