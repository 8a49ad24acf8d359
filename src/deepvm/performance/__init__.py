"""Machines and measurements in; eFLOPS, speedup curves, memory-node counts and restore times out. For the planner."""

from deepvm.performance.allreduce import (
    DEFAULT_EFFICIENCY,
    DEFAULT_LATENCY_S,
    DEFAULT_OVERLAP,
    AllReduce,
    allreduce_speedup,
)
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
from deepvm.performance.restore import RestorePath, RestoreTime, restore_s, restore_time
from deepvm.performance.saturation import (
    DEFAULT_UTILISATION,
    bandwidth_memory_nodes,
    estimate_sustained_gbps,
    table_memory_nodes,
    table_workers,
)

__all__ = [
    "DEFAULT_EFFICIENCY",
    "DEFAULT_LATENCY_S",
    "DEFAULT_OVERLAP",
    "DEFAULT_UTILISATION",
    "MODELS",
    "AllReduce",
    "Fit",
    "Logistic",
    "MeasuredPoints",
    "RestorePath",
    "RestoreTime",
    "SpeedupCurve",
    "UniversalScalability",
    "allreduce_speedup",
    "bandwidth_memory_nodes",
    "curve_from_spec",
    "estimate_eflops",
    "estimate_sustained_gbps",
    "fit",
    "restore_s",
    "restore_time",
    "table_memory_nodes",
    "table_workers",
]
