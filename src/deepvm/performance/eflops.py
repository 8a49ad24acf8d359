"""eFLOPS, the training speed of one machine: data-sheet figures in, an estimate out. A measured T4 has 377."""

from __future__ import annotations

import math

from deepvm.performance.checks import check_number

T4_EFLOPS = 377.0  # measured; the estimate passes through it
T4_TFLOPS_16BIT = 65.0
T4_GBYTES_PER_S = 320.0


def estimate_eflops(*, tflops_16bit: float, memory_gbytes_per_s: float, count: float = 1.0) -> float:
    """Estimate eFLOPS from the data sheet of ``count`` accelerators, for machines without a measurement.

    The estimate is the geometric mean of compute and memory bandwidth, each relative to a T4, times the T4's measured
    377 eFLOPS. Training is bound by both in turn. Compute alone overstates GPUs whose tensor cores starve; bandwidth
    alone understates tensor cores. The mean has no parameter that three measurements could not support. It is exact
    for the T4 (by construction), 27 % low for half an M60 (73 for 100) and 23 % low for an A10G (536 for 696).
    """
    check_number("tflops_16bit", tflops_16bit, above=0)
    check_number("memory_gbytes_per_s", memory_gbytes_per_s, above=0)
    check_number("count", count, above=0)  # a slice of a GPU is a fraction
    compute, memory = tflops_16bit / T4_TFLOPS_16BIT, memory_gbytes_per_s / T4_GBYTES_PER_S
    return T4_EFLOPS * math.sqrt(compute) * math.sqrt(memory) * count
