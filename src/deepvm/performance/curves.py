"""How much faster n machines are than one: a spec from the catalogue in, one of six models out. The planner asks it.

A curve that came from measurements has their range of node counts (``measured``). Values outside of it are
extrapolations, and are marked so where they are shown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import ArrayLike

from deepvm.errors import UnknownName, UsageError
from deepvm.performance.allreduce import AllReduce
from deepvm.performance.checks import Floats, ParametricCurve, check_number, node_counts
from deepvm.performance.cluster.batch import LimitedBatch
from deepvm.performance.cluster.interconnect import ClusterAllReduce


class SpeedupCurve(Protocol):
    """Vectorised over node counts of one and more."""

    @property
    def model(self) -> str:
        """The name that a spec goes by."""

    @property
    def measured(self) -> tuple[int, int] | None:
        """The lowest and highest node count that was measured; None where nothing was."""

    def speedup(self, nodes: ArrayLike) -> Floats:
        """The work that n machines do in the time in which one machine does 1."""

    def scaling(self, nodes: ArrayLike) -> Floats:
        """What multiplies eFLOPS × n to give the performance of n machines."""

    def to_spec(self) -> dict[str, Any]:
        """The curve as JSON, which ``curve_from_spec`` reads back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Logistic(ParametricCurve):
    """DeepVM's published model: a logistic S(n) through measured speedups, and a ScalingFactor made of it.

    L is the tangent of S at its midpoint b. ScalingFactor(n) is 1 up to b, and S(n)/L(n) beyond. The model
    claims n × ScalingFactor(n) as the work of n machines. ``speedup`` returns that claim, so that plans equal the
    published ones. The measured speedup is ``published_speedup``, S itself.
    """

    model: ClassVar[str] = "logistic"
    bounds: ClassVar[Mapping[str, Mapping[str, float]]] = {"a": {"above": 0}, "b": {}, "c": {"above": 0}}

    a: float
    b: float
    c: float
    measured: tuple[int, int] | None = None

    def published_speedup(self, nodes: ArrayLike) -> Floats:
        """S(n) = c / (1 + e^(-a(n-b)))."""
        with np.errstate(over="ignore"):
            z = self.a * (node_counts(nodes) - self.b)
        small = np.exp(-np.abs(z))  # never above 1, so that no exponent overflows
        return np.asarray(self.c * np.where(z >= 0, 1.0, small) / (1.0 + small))

    def scaling(self, nodes: ArrayLike) -> Floats:
        """S/L beyond b, with c divided out of both: 1/(1 + e^-z) over z/4 + 1/2, where z = a(n-b)."""
        with np.errstate(over="ignore"):
            z = np.maximum(0.0, self.a * (node_counts(nodes) - self.b))
        return np.asarray(4.0 / ((1.0 + np.exp(-z)) * (z + 2.0)))

    def speedup(self, nodes: ArrayLike) -> Floats:
        return node_counts(nodes) * self.scaling(nodes)


@dataclass(frozen=True, kw_only=True, slots=True)
class UniversalScalability(ParametricCurve):
    """Gunther's law, n / (1 + sigma (n-1) + kappa n (n-1)): sigma for contention, kappa for coherency."""

    model: ClassVar[str] = "universal-scalability"
    bounds: ClassVar[Mapping[str, Mapping[str, float]]] = {"sigma": {"at_least": 0}, "kappa": {"at_least": 0}}

    sigma: float
    kappa: float
    measured: tuple[int, int] | None = None

    def scaling(self, nodes: ArrayLike) -> Floats:
        n = node_counts(nodes)
        with np.errstate(over="ignore"):
            return np.asarray(1.0 / (1.0 + self.sigma * (n - 1.0) + self.kappa * n * (n - 1.0)))

    def speedup(self, nodes: ArrayLike) -> Floats:
        return node_counts(nodes) * self.scaling(nodes)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredPoints:
    """The measurements themselves: the same work done in ``seconds`` by this many ``nodes``.

    Exact at measured counts. In between a cubic keeps the data's shape (PCHIP on the speedup), so that it rises only
    where they rise. Beyond the last point the speedup stays that point's: more was never measured.
    """

    model: ClassVar[str] = "measured"

    nodes: tuple[int, ...]
    seconds: tuple[float, ...]
    _speedups: Floats = field(init=False, repr=False, compare=False)
    _between: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        nodes, seconds = _sequence("nodes", self.nodes), _sequence("seconds", self.seconds)
        if len(nodes) != len(seconds) or len(nodes) < 2:
            raise UsageError(
                f"measured: {len(nodes)} node counts and {len(seconds)} times, at least two pairs are needed"
            )
        for count, time_s in zip(nodes, seconds, strict=True):
            check_number("measured: nodes", count, at_least=1)
            if count != int(count):
                raise UsageError(f"measured: nodes is {count!r}, node counts are whole numbers")
            check_number("measured: seconds", time_s, above=0)
        if any(later <= earlier for earlier, later in pairwise(nodes)):
            raise UsageError("measured: node counts must ascend, each of them once")
        if nodes[0] != 1:
            raise UsageError(
                f"measured: the fewest nodes are {nodes[0]}, a speedup is relative to one: measure one machine too"
            )
        with np.errstate(over="ignore"):
            speedups = seconds[0] / np.asarray(seconds, dtype=np.float64)
        if not np.isfinite(speedups).all():
            raise UsageError("measured: the times are too far apart to be of the same work")
        from scipy.interpolate import PchipInterpolator  # takes 0.4 s, only measurements need it

        object.__setattr__(self, "nodes", tuple(int(count) for count in nodes))
        object.__setattr__(self, "seconds", tuple(float(time_s) for time_s in seconds))
        object.__setattr__(self, "_speedups", speedups)
        object.__setattr__(self, "_between", PchipInterpolator(np.asarray(nodes, dtype=np.float64), speedups))

    @property
    def measured(self) -> tuple[int, int]:
        return self.nodes[0], self.nodes[-1]

    def speedup(self, nodes: ArrayLike) -> Floats:
        n, last = node_counts(nodes), self.nodes[-1]
        between = np.asarray(self._between(np.minimum(n, last)), dtype=np.float64)
        return np.where(n >= last, self._speedups[-1], between)

    def scaling(self, nodes: ArrayLike) -> Floats:
        return self.speedup(nodes) / node_counts(nodes)

    def to_spec(self) -> dict[str, Any]:
        return {"model": self.model, "nodes": list(self.nodes), "seconds": list(self.seconds)}


MODELS: Mapping[str, type[Any]] = {
    kind.model: kind
    for kind in (AllReduce, ClusterAllReduce, LimitedBatch, Logistic, MeasuredPoints, UniversalScalability)
}


def curve_from_spec(spec: Mapping[str, Any]) -> SpeedupCurve:
    """Make a curve from its JSON form, such as ``{"model": "logistic", "a": 0.13, "b": 12.9, "c": 6.2}``."""
    if not isinstance(spec, Mapping) or not isinstance(spec.get("model"), str):
        raise UsageError(f"a speedup curve needs a model, one of {', '.join(MODELS)}: found {spec!r}")
    kind = MODELS.get(spec["model"])
    if kind is None:
        raise UnknownName("speedup model", spec["model"], MODELS)
    fields = {f.name: f for f in dataclasses.fields(kind) if f.init}
    parameters = {key: value for key, value in spec.items() if key != "model"}
    unknown = [key for key in parameters if key not in fields]
    if unknown:
        raise UnknownName(f"parameter of {spec['model']}", str(unknown[0]), fields)
    missing = [name for name, f in fields.items() if f.default is dataclasses.MISSING and name not in parameters]
    if missing:
        raise UsageError(f"a speedup curve of the model {spec['model']} needs {', '.join(missing)} too")
    curve: SpeedupCurve = kind(**parameters)
    return curve


def _sequence(what: str, values: Any) -> tuple[Any, ...]:
    if isinstance(values, str | bytes | Mapping):
        raise UsageError(f"measured: {what} is {values!r}, not a list of numbers")
    try:
        return tuple(values)
    except TypeError:
        raise UsageError(f"measured: {what} is {values!r}, not a list of numbers") from None
