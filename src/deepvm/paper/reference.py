"""Published and measured data: the paper's Table IV, the data of its figures, and results of running its method.

"DeepVM: Integrating Spot and On-Demand VMs for Cost-Efficient Deep Learning Clusters in the Cloud", CCGrid 2024,
and the data that its authors published with it. Nothing here is computed by this project.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deepvm.performance.network.transmission import PAPER_TRANSMISSION_S


@dataclass(frozen=True, slots=True)
class PublishedCluster:
    """A row of Table IV, with the makespan and the hourly price behind its cost (Figure 4)."""

    name: str
    policy: str
    rank: int
    gpu: str
    gpu_count: int
    cpu: str | None
    cpu_count: int
    total_usd: float
    makespan_s: float
    hourly_usd: float


# Table IV and Figure 4: 30 epochs of ResNet-50 at a budget of $3 an hour, two buffers of 300 MB. NoScale's cluster is
# DeepVM's first, and was not run again.
TABLE_IV_BUDGET_USD = 3.0
TABLE_IV_CHECKPOINT_BYTES = 300_000_000
TABLE_IV: tuple[PublishedCluster, ...] = (
    PublishedCluster("DeepVM 1st", "deepvm", 1, "g4dn.xlarge", 17, "c5.xlarge", 1, 0.1991, 251.25, 2.8526),
    PublishedCluster("DeepVM 2nd", "deepvm", 2, "g4dn.xlarge", 17, "m6i.xlarge", 1, 0.2013, 252.13, 2.8746),
    PublishedCluster("DeepVM 3rd", "deepvm", 3, "g4dn.xlarge", 17, "c5n.xlarge", 1, 0.2022, 251.13, 2.8986),
    PublishedCluster("NoScale", "noscale", 1, "g4dn.xlarge", 17, "c5.xlarge", 1, 0.1991, 251.25, 2.8526),
    PublishedCluster("Cost-First", "cost-first", 1, "g4dn.xlarge", 16, None, 0, 0.2385, 296.77, 2.893),
    PublishedCluster("Performance-First", "performance-first", 1, "g5.xlarge", 7, None, 0, 0.3865, 493.93, 2.8168),
)

# Figure 3: the virtual catalogue, two buffers of 500 MB, budgets of $0 to $10 by $0.1.
SWEEP_USD = (0.0, 10.0, 0.1)
SWEEP_CHECKPOINT_BYTES = 500_000_000
BUFFERS = 2

# Claims of the paper's text about Figure 3.
NOSCALE_BELOW_COST_FIRST_ABOVE_USD = 2.5
PERFORMANCE_FIRST_FALLS_AT_USD = 1.6


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepStatistics:
    """The published choices beside the optimum, by the paper's own definition of performance.

    Ratios are of the optimum to the choice; the mean is over all feasible budgets."""

    feasible: int
    not_optimal: int
    worst_ratio: float
    mean_ratio: float
    behind_performance_first: int


# By running the published method on the published data and comparing its choices with all others.
SWEEP_STATISTICS = SweepStatistics(
    feasible=98, not_optimal=44, worst_ratio=2.17, mean_ratio=1.20, behind_performance_first=13
)

# The scaling figure: seconds of one epoch of ResNet-18 on CIFAR-10 by number of machines.
SCALING_NODES = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32)
SCALING_S: Mapping[str, tuple[float, ...]] = {
    "g3s.xlarge": (245.59, 138.38, 98.94, 54.10, 38.11, 30.82, 26.14, 22.84, 19.31, 19.60),
    "g4dn.xlarge": (61.16, 59.04, 43.99, 26.90, 19.96, 16.34, 14.15, 12.78, 11.14, 11.65),
    "g5.xlarge": (31.01, 65.60, 50.19, 30.20, 22.54, 18.27, 15.11, 13.88, 11.29, 10.77),
}
# The job of these times, for models that need it.
SCALING_GRADIENT_BYTES = 44.7e6  # 11.17 M parameters in FP32
SCALING_STEPS = 391  # 50,000 images in batches of 128, on one machine
SCALING_GBPS: Mapping[str, float] = {  # sustained; of g3s.xlarge only the advertised rate is known
    "g3s.xlarge": 10.0,
    "g4dn.xlarge": 5.0,
    "g5.xlarge": 2.5,
}

# The job of Table IV, ResNet-50. Its gradients are a third of the published checkpoint (Adam: weights and two moments).
# Its compute is to ResNet-18's as the published multiply-adds, 4.09 to 1.81 billion. Its batch is not published.
TABLE_IV_GRADIENT_BYTES = TABLE_IV_CHECKPOINT_BYTES / 3
TABLE_IV_COMPUTE_RATIO = 4.09 / 1.81

# The makespan of Performance-First over DeepVM's first: measured, and by two models.
PERFORMANCE_FIRST_RATIO_MEASURED = 1.97
PERFORMANCE_FIRST_RATIO_BY_POINTS = 2.13
PERFORMANCE_FIRST_RATIO_BY_PAPER = 1.31
SEVEN_G5_SPEEDUP = 0.93  # interpolated between 4 and 8 machines; the paper's model says 7

# The transmission figure: seconds to send one checkpoint, by number of memory nodes from one on.
TRANSMISSION_S = PAPER_TRANSMISSION_S
