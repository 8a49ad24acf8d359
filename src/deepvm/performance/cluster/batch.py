"""A limit on the global batch: scaling with full memories and the limit in, scaling with smaller batches out.

With a limit of N samples, each of G GPUs computes N/G of them. Its step gets shorter, but not in proportion, and the
exchange of gradients stays as long as it was. So the speedup saturates, whatever curve it had.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from deepvm.errors import UsageError
from deepvm.performance.checks import Floats, check_number, node_counts

if TYPE_CHECKING:
    from deepvm.performance.curves import SpeedupCurve

# A step of no samples would still take this share of a step with full memory: kernel launches, the optimizer's pass
# over all parameters, and kernels too small for the GPU. An assumption, not a measurement: two batch sizes measured on
# the GPU tell the true share.
FIXED_STEP_SHARE = 0.1


def limited_scaling(
    scaling: ArrayLike,
    *,
    gpus: ArrayLike,
    batch: ArrayLike,
    global_batch: ArrayLike,
    compute_share: ArrayLike = 1.0,
    fixed_share: ArrayLike = FIXED_STEP_SHARE,
) -> Floats:
    """Return the scaling of clusters of ``gpus`` GPUs under a limit of ``global_batch`` samples. Arguments broadcast.

    ``scaling`` is that with ``batch`` samples on each GPU, and ``compute_share`` the share of one machine's step that
    computes. The limit gives each GPU b = min(batch, limit / gpus) samples, some one more than others; the step waits
    for these. With h = fixed + (1 - fixed) × b/batch, compute shrinks to h of itself and the exchange remains. More
    GPUs than samples give NaN: such a cluster cannot train this job.
    """
    full, count, most, limit, computes, fixed = (
        np.asarray(figure, dtype=np.float64)
        for figure in (scaling, gpus, batch, global_batch, compute_share, fixed_share)
    )
    each = limit / count
    with np.errstate(divide="ignore", invalid="ignore"):
        work = each / most
        compute = fixed + (1.0 - fixed) * np.minimum(1.0, np.ceil(each * (1 - 1e-12)) / most)
        # 1/scaling is the step with full batches, relative to that of one machine.
        limited = work / (np.maximum(1.0, 1.0 / full) - (1.0 - compute) * computes)
    return np.where(count > limit, np.nan, np.where(work >= 1.0, full, limited))


@dataclass(frozen=True, kw_only=True, slots=True)
class LimitedBatch:
    """Any curve, for a job whose global batch is limited. ``batch`` fills the memory of one GPU."""

    model: ClassVar[str] = "limited-batch"

    curve: Mapping[str, Any]  # with full memories, as ``curve_from_spec`` reads it
    gpus: float  # of one machine
    batch: float
    global_batch: int
    compute_share: float = 1.0
    fixed_share: float = FIXED_STEP_SHARE
    _full: SpeedupCurve = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        from deepvm.performance.curves import curve_from_spec

        for name in ("gpus", "batch"):
            check_number(f"{self.model}: {name}", getattr(self, name), above=0)
        check_number(f"{self.model}: global_batch", self.global_batch, at_least=1)
        check_number(f"{self.model}: compute_share", self.compute_share, above=0, at_most=1)
        check_number(f"{self.model}: fixed_share", self.fixed_share, at_least=0, at_most=1)
        full = curve_from_spec(self.curve)
        if isinstance(full, LimitedBatch):
            raise UsageError(f"{self.model}: its curve has a limit already")
        object.__setattr__(self, "_full", full)

    @property
    def measured(self) -> tuple[int, int] | None:
        return self._full.measured

    def scaling(self, nodes: ArrayLike) -> Floats:
        return limited_scaling(
            self._full.scaling(nodes),
            gpus=node_counts(nodes) * self.gpus,
            batch=self.batch,
            global_batch=self.global_batch,
            compute_share=self.compute_share,
            fixed_share=self.fixed_share,
        )

    def speedup(self, nodes: ArrayLike) -> Floats:
        """Relative to one machine with full memory."""
        return node_counts(nodes) * self.scaling(nodes)

    def to_spec(self) -> dict[str, Any]:
        figures = ("gpus", "batch", "global_batch", "compute_share", "fixed_share")
        return {"model": self.model, "curve": dict(self.curve), **{name: getattr(self, name) for name in figures}}
