"""The transmission figure: published times by number of memory nodes in, our fitted curve and its errors out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepvm.paper import reference
from deepvm.paper.comparison import Comparison
from deepvm.performance.network.transmission import CurveFit, TransmissionCurve, fit_transmission_curve

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class TransmissionTimes:
    """The published times, the curve fitted to them, and the times if m nodes took 1/m of the time of one."""

    nodes: tuple[int, ...]
    seconds: tuple[float, ...]
    fit: CurveFit
    left_out_error: float  # mean; each inner point predicted from the others

    @property
    def fitted_s(self) -> Floats:
        return self.fit.curve.seconds(self.nodes)

    @property
    def shared_s(self) -> Floats:
        return np.asarray(self.seconds[0] / np.array(self.nodes))

    @property
    def shared_error(self) -> float:
        """The mean relative error of 1/m."""
        return float(np.abs(self.shared_s / np.array(self.seconds) - 1).mean())

    def rows(self) -> list[dict[str, Any]]:
        return [
            {"memory_nodes": m, "seconds": s, "fitted_s": float(f), "error": float(f / s - 1), "shared_s": float(h)}
            for m, s, f, h in zip(self.nodes, self.seconds, self.fitted_s, self.shared_s, strict=True)
        ]


def make_transmission() -> TransmissionTimes:
    seconds = reference.TRANSMISSION_S
    nodes = tuple(range(1, len(seconds) + 1))
    return TransmissionTimes(
        nodes=nodes,
        seconds=seconds,
        fit=fit_transmission_curve(nodes, seconds),
        left_out_error=_left_out_error(nodes, seconds),
    )


def _left_out_error(nodes: tuple[int, ...], seconds: tuple[float, ...]) -> float:
    """Leave out one point after the other. The ends stay: without them, a curve is asked about what lies beyond."""

    def without(i: int) -> TransmissionCurve:
        return fit_transmission_curve((*nodes[:i], *nodes[i + 1 :]), (*seconds[:i], *seconds[i + 1 :])).curve

    inner = range(1, len(nodes) - 1)
    return float(np.mean([abs(float(without(i).seconds(nodes[i])) / seconds[i] - 1) for i in inner]))


def compare(times: TransmissionTimes) -> list[Comparison]:
    def line(quantity: str, published: float, ours: float, *, note: str = "", decimals: int = 2) -> Comparison:
        return Comparison(
            part="Transmission", kind="predicted", subject="a checkpoint", quantity=quantity,
            published=published, ours=ours, decimals=decimals, note=note,
        )  # fmt: skip

    lines = [
        line(f"seconds on {m} memory node{'s' * (m > 1)}", s, float(f), note="fitted curve")
        for m, s, f in zip(times.nodes, times.seconds, times.fitted_s, strict=True)
    ]
    lines.append(
        line("mean error of the curve", times.shared_error, times.fit.mean_relative_error, decimals=3,
             note=f"published: 1/m of one node's time; points left out: {times.left_out_error:.1%}")
    )  # fmt: skip
    return lines
