"""The scaling figure: measured times in, a fitted curve of every family and its errors out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepvm.catalog import Catalog
from deepvm.paper import reference
from deepvm.paper.comparison import Comparison
from deepvm.performance import Fit, Logistic, curve_from_spec, fit

Floats = NDArray[np.float64]
MODELS = ("measured", "logistic", "all-reduce", "universal-scalability")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaling:
    """One machine type: its measured times, the curves fitted to them, and the paper's curve."""

    instance: str
    nodes: tuple[int, ...]
    seconds: tuple[float, ...]
    fits: Mapping[str, Fit]
    published: Logistic

    def predicted_s(self, model: str, nodes: Floats) -> Floats:
        """Return seconds by a fitted curve; for the logistic by S(n), and by the paper's use of it in ``claimed_s``."""
        curve = self.fits[model].curve
        speedup = curve.published_speedup(nodes) if isinstance(curve, Logistic) else curve.speedup(nodes)
        return np.asarray(self.seconds[0] / speedup)

    def claimed_s(self, nodes: Floats) -> Floats:
        """Return seconds by n × ScalingFactor(n), the paper's factor of eFLOPS."""
        return np.asarray(self.seconds[0] / self.published.speedup(nodes))

    @property
    def claim_error(self) -> float:
        """The worst relative error of n × ScalingFactor as a speedup."""
        return self._worst(self.published.speedup(np.array(self.nodes)))

    @property
    def published_error(self) -> float:
        """The worst relative error of S(n) with the published parameters."""
        return self._worst(self.published.published_speedup(np.array(self.nodes)))

    def _worst(self, speedup: Floats) -> float:
        measured = self.seconds[0] / np.array(self.seconds)
        return float(np.abs(speedup / measured - 1).max())


def make_scalings(catalog: Catalog) -> tuple[Scaling, ...]:
    return tuple(_scaling(catalog, instance) for instance in reference.SCALING_S)


def _scaling(catalog: Catalog, instance: str) -> Scaling:
    nodes, seconds = reference.SCALING_NODES, reference.SCALING_S[instance]
    known = {
        "gradient_bytes": reference.SCALING_GRADIENT_BYTES,
        "sustained_gbps": reference.SCALING_GBPS[instance],
        "steps": float(reference.SCALING_STEPS),
    }
    published = curve_from_spec(catalog.instance(instance).speedup or {})
    assert isinstance(published, Logistic)  # noqa: S101 - the catalogue is built in
    return Scaling(
        instance=instance,
        nodes=nodes,
        seconds=seconds,
        fits={m: fit(m, nodes, seconds, **(known if m == "all-reduce" else {})) for m in MODELS},
        published=published,
    )


def compare(scalings: tuple[Scaling, ...]) -> list[Comparison]:
    lines = []
    for scaling in scalings:
        ours = scaling.fits["logistic"].curve
        assert isinstance(ours, Logistic)  # noqa: S101
        figures = [(f"logistic {name}", getattr(scaling.published, name), getattr(ours, name)) for name in "abc"]
        figures.append(("worst error of S(n)", scaling.published_error, scaling.fits["logistic"].worst_relative_error))
        lines += [
            Comparison(
                part="Scaling", kind="refitted", subject=scaling.instance, quantity=quantity,
                published=published, ours=now, note="least squares on the published times",
            )
            for quantity, published, now in figures
        ]  # fmt: skip
    return lines
