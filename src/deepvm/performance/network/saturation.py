"""How many memory nodes a cluster needs, so that checkpoints do not wait for the network: bandwidths in, counts out.

Bandwidths are in Gbit/s, vectorised; unknown (NaN) stays unknown. If workers and memory nodes differ, pass the smaller
bandwidth. The planner's board asks it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from deepvm.errors import UsageError
from deepvm.performance.checks import Floats, check_number

# DeepVM's published table: a memory node of this many Gbit/s serves this many workers.
TABLE_GBPS = (0.3, 1.7, 5.0, 10.0, 12.5, 15.0, 25.0, 30.0)
TABLE_WORKERS = (2.0, 12.0, 16.0, 20.0, 24.0, 24.0, 28.0, 32.0)

DEFAULT_UTILISATION = 0.5  # the other half is for gradients, and for restores while others save
GBPS_PER_VCPU = 0.25
_ROUNDING = 1e-12  # figures are decimal, floats binary: rounding must not add a node


def table_workers(gbps: ArrayLike) -> Floats:
    """Return how many workers saturate one memory node, by the published table.

    Its rows are exact. Between them the count is interpolated linearly. Below the first it is proportional to the
    bandwidth. Above the last it is constant: nothing was measured beyond.
    """
    rate = _bandwidths(gbps)
    below = rate * (TABLE_WORKERS[0] / TABLE_GBPS[0])
    return np.where(rate < TABLE_GBPS[0], below, np.interp(rate, TABLE_GBPS, TABLE_WORKERS))


def table_memory_nodes(workers: ArrayLike, gbps: ArrayLike) -> Floats:
    """Return the fewest memory nodes m >= 1 with workers/m < ``table_workers``; inf without bandwidth."""
    count = np.asarray(workers, dtype=np.float64)
    if count.size and count.min() < 0:
        raise UsageError("the number of workers must not be negative")
    limit = table_workers(gbps)
    served = np.where(limit > 0, limit, np.nan)
    # workers/m < limit is m > workers/limit: the next whole number. A quotient that is whole but for its rounding
    # counts as whole, so that 18 workers saturate a limit of 18 even where interpolation left it at 18 + 4e-15.
    nodes = np.floor(count / served * (1.0 + _ROUNDING)) + 1.0
    return np.where(limit == 0, np.where(count > 0, np.inf, 1.0), nodes)


def bandwidth_memory_nodes(
    checkpoint_bytes: ArrayLike,
    interval_s: ArrayLike,
    gbps: ArrayLike,
    utilisation: float = DEFAULT_UTILISATION,
) -> Floats:
    """Return the fewest memory nodes that receive a checkpoint every ``interval_s`` within ``utilisation`` of their
    sustained bandwidth; inf without bandwidth.
    """
    check_number("utilisation", utilisation, above=0, at_most=1)
    size, interval = np.asarray(checkpoint_bytes, dtype=np.float64), np.asarray(interval_s, dtype=np.float64)
    if (size.size and size.min() < 0) or (interval.size and interval.min() <= 0):
        raise UsageError("checkpoints need a size of zero bytes or more and an interval above zero seconds")
    usable_bits = _bandwidths(gbps) * 1e9 * utilisation * interval
    bits = 8.0 * size
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        nodes = np.ceil(bits / usable_bits * (1.0 - _ROUNDING))
    return np.where((bits == 0) & (usable_bits == 0), 1.0, np.maximum(1.0, nodes))


def estimate_sustained_gbps(vcpus: ArrayLike) -> Floats:
    """Estimate a bandwidth that neither the catalogue nor the type's family has: 0.25 Gbit/s per vCPU.

    This is below the rates that EC2 publishes for general machines: 1 Gbit/s for 4 vCPUs, where c5.xlarge sustains 1.25
    and m6i.xlarge 1.562. Burstable machines sustain less (t3.nano 0.032 with 2 vCPUs), network-optimised ones far more.
    """
    count = np.asarray(vcpus, dtype=np.float64)
    if count.size and count.min() <= 0:
        raise UsageError("the number of vCPUs must be above zero")
    return np.asarray(GBPS_PER_VCPU * count)


def _bandwidths(gbps: ArrayLike) -> Floats:
    rate = np.asarray(gbps, dtype=np.float64)
    if (rate < 0).any():
        raise UsageError("a bandwidth must not be negative")
    return rate
