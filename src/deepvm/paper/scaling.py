"""The scaling figure: measured times in, a fitted curve of every family and its errors out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from deepvm.catalog import Catalog
from deepvm.paper import reference
from deepvm.paper.comparison import Comparison
from deepvm.performance import Fit, Logistic, curve_from_spec, fit

Floats = NDArray[np.float64]
MODELS = ("measured", "logistic", "all-reduce", "universal-scalability")

# Two halves of the measured points to fit to. Both have one machine, which speedups are relative to.
HALVES = (reference.SCALING_NODES[::2], (1, *reference.SCALING_NODES[1::2]))


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

    def held_out_error(self, speedup: Floats, nodes: NDArray[np.int64]) -> float:
        """Return the mean relative error of the times that these speedups give."""
        measured = np.array([self.seconds[self.nodes.index(n)] for n in nodes])
        return float(np.abs(self.seconds[0] / speedup / measured - 1).mean())

    @property
    def mean_claim_error(self) -> float:
        return float(self._errors(self.published.speedup(np.array(self.nodes))).mean())

    def mean_error(self, model: str) -> float:
        """The mean relative error of a fitted curve as a speedup."""
        return float(self._errors(self.seconds[0] / self.predicted_s(model, np.array(self.nodes, dtype=float))).mean())

    @property
    def best(self) -> str:
        """The fitted model with the least mean error; the points themselves do not count."""
        return min((model for model in self.fits if model != "measured"), key=self.mean_error)

    def _worst(self, speedup: Floats) -> float:
        return float(self._errors(speedup).max())

    def _errors(self, speedup: Floats) -> Floats:
        measured = self.seconds[0] / np.array(self.seconds)
        return np.asarray(np.abs(speedup / measured - 1))


def make_scalings(catalog: Catalog) -> tuple[Scaling, ...]:
    return tuple(_scaling(catalog, instance) for instance in reference.SCALING_S)


@cache
def fit_all_reduce(instance: str, nodes: tuple[int, ...] = reference.SCALING_NODES) -> Fit:
    """Fit the all-reduce model to the measured times of these numbers of machines."""
    seconds = dict(zip(reference.SCALING_NODES, reference.SCALING_S[instance], strict=True))
    return fit(
        "all-reduce",
        nodes,
        [seconds[n] for n in nodes],
        gradient_bytes=reference.SCALING_GRADIENT_BYTES,
        sustained_gbps=reference.SCALING_GBPS[instance],
        steps=float(reference.SCALING_STEPS),
    )


def _scaling(catalog: Catalog, instance: str) -> Scaling:
    nodes, seconds = reference.SCALING_NODES, reference.SCALING_S[instance]
    published = curve_from_spec(catalog.instance(instance).speedup or {})
    assert isinstance(published, Logistic)  # noqa: S101 - the catalogue is built in
    return Scaling(
        instance=instance,
        nodes=nodes,
        seconds=seconds,
        fits={m: fit_all_reduce(instance) if m == "all-reduce" else fit(m, nodes, seconds) for m in MODELS},
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
        lines += [_compare_half(scaling, half) for half in HALVES]
        lines.append(
            Comparison(
                part="Scaling", kind="improved", subject=scaling.instance, quantity="mean error of the speedup",
                published=scaling.mean_claim_error, ours=scaling.mean_error(scaling.best), decimals=3,
                note=f"published: n × ScalingFactor; ours: {scaling.best}",
            )
        )  # fmt: skip
    return lines


def _compare_half(scaling: Scaling, half: tuple[int, ...]) -> Comparison:
    """Compare predictions of the points that a fit did not see."""
    held = np.array([n for n in scaling.nodes if n not in half])
    logistic = fit("logistic", half, [scaling.seconds[scaling.nodes.index(n)] for n in half]).curve
    assert isinstance(logistic, Logistic)  # noqa: S101
    return Comparison(
        part="Scaling", kind="improved", subject=scaling.instance,
        quantity=f"mean error at {', '.join(map(str, held))} machines",
        published=scaling.held_out_error(logistic.published_speedup(held), held),
        ours=scaling.held_out_error(fit_all_reduce(scaling.instance, half).curve.speedup(held), held),
        note=f"the paper's curve and our all-reduce, both fitted to {', '.join(map(str, half))} machines only",
    )  # fmt: skip
