"""What every curve shares: checks of its numbers, and the form of its parameters in JSON. Curves import it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deepvm.errors import UsageError

Floats = NDArray[np.float64]


def check_number(
    what: str,
    value: object,
    *,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
) -> None:
    """Raise UsageError unless ``value`` is a finite number within these bounds."""
    if not isinstance(value, bool) and isinstance(value, Real):
        try:
            number = float(value)
        except OverflowError:  # an integer of more than 308 digits
            number = math.inf
        if (
            math.isfinite(number)
            and (above is None or number > above)
            and (at_least is None or number >= at_least)
            and (at_most is None or number <= at_most)
        ):
            return
    bounds = [
        f"{word} {bound:g}"
        for word, bound in (("above", above), ("at least", at_least), ("at most", at_most))
        if bound is not None
    ]
    raise UsageError(f"{what} is {value!r}, it must be {' and '.join(['a finite number', *bounds])}")


def check_measured_range(owner: str, measured: tuple[int, int] | None) -> tuple[int, int] | None:
    """Return the range as a tuple of integers; JSON brings it as a list."""
    if measured is None:
        return None
    try:
        low, high = measured
    except (TypeError, ValueError):
        raise UsageError(f"{owner}: measured is {measured!r}, not a lowest and a highest node count") from None
    for bound in (low, high):
        check_number(f"{owner}: measured", bound, at_least=1)
        if bound != int(bound):
            raise UsageError(f"{owner}: measured is {measured!r}, node counts are whole numbers")
    if low > high:
        raise UsageError(f"{owner}: measured is {measured!r}, the lowest node count comes first")
    return int(low), int(high)


def node_counts(nodes: ArrayLike) -> Floats:
    """Return node counts as floats. UsageError below one node: curves start at one machine."""
    n = np.asarray(nodes, dtype=np.float64)
    if n.size and not (n.min() >= 1 and n.max() < np.inf):
        raise UsageError("a speedup needs node counts of 1 and more, all finite")
    return n


class ParametricCurve:
    """A curve made of a few numbers. Subclasses are dataclasses with the fields of ``bounds`` and ``measured``."""

    __slots__ = ()
    model: ClassVar[str]
    bounds: ClassVar[Mapping[str, Mapping[str, float]]]
    measured: tuple[int, int] | None

    def __post_init__(self) -> None:
        for name, bounds in self.bounds.items():
            check_number(f"{self.model}: {name}", getattr(self, name), **bounds)
        object.__setattr__(self, "measured", check_measured_range(self.model, self.measured))

    def parameters(self) -> dict[str, float]:
        return {name: float(getattr(self, name)) for name in self.bounds}

    def to_spec(self) -> dict[str, Any]:
        spec: dict[str, Any] = {"model": self.model, **self.parameters()}
        return spec if self.measured is None else {**spec, "measured": list(self.measured)}
