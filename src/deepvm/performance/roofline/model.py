"""A roofline as a value: what a step asks for and a machine's peaks in, the step's time with an interval out.

Time is arithmetic and memory traffic, joined by a knee, plus the start of operations and the exchange of gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deepvm import strict_json as strict
from deepvm.errors import UsageError
from deepvm.json_fields import json_fields
from deepvm.performance.checks import Floats, check_number

UNTESTED = 0.5  # standard deviation of a roofline whose error could not be tested: a factor of 2.3 to each side
_SURE = 1.64  # standard deviations to each side: nine of ten
TERMS = ("compute", "memory", "operation", "exchange")


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What one step asks of a machine."""

    flops: float
    traffic_bytes: float
    operations: float = 0.0
    exchanged_bytes: float = 0.0  # gradients of one worker

    def __post_init__(self) -> None:
        for name in ("flops", "traffic_bytes", "operations", "exchanged_bytes"):
            check_number(f"{name} of a step", getattr(self, name), at_least=0)
        if not self.flops and not self.traffic_bytes:
            raise UsageError("a step without FLOPs and memory traffic takes no time: count at least one of them")

    def to_json(self) -> dict[str, Any]:
        return json_fields(self, "flops traffic_bytes operations exchanged_bytes")

    @classmethod
    def from_json(cls, document: Any) -> Load:
        table = strict.table(document, "load")
        names = ("flops", "traffic_bytes", "operations", "exchanged_bytes")
        return cls(**{name: strict.number(strict.member(table, name), name, 0, 1e30) for name in names})


@dataclass(frozen=True, kw_only=True, slots=True)
class Peaks:
    """The data sheet of a device for one precision. For a device without one, all 1: the shares are then rates."""

    device: str
    flops_per_s: float = 1.0
    bytes_per_s: float = 1.0

    def __post_init__(self) -> None:
        check_number(f"peak FLOP/s of {self.device}", self.flops_per_s, above=0)
        check_number(f"peak bytes/s of {self.device}", self.bytes_per_s, above=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class RooflinePoint:
    """One measured step. Points with the same ``relative_to`` know their times up to one common factor."""

    peaks: Peaks
    load: Load
    step_s: float
    relative_to: str | None = None
    label: str = ""  # names it among the points of one device

    def __post_init__(self) -> None:
        check_number("the time of a step", self.step_s, above=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """A step time with an interval that should contain nine of ten measurements."""

    seconds: float
    low_s: float
    high_s: float
    origin: str  # measured, or estimated and how

    def to_json(self) -> dict[str, Any]:
        return json_fields(self, "seconds low_s high_s origin")


@dataclass(frozen=True, kw_only=True, slots=True)
class Roofline:
    """Shares of the peaks that steps reach. ``leave_one_out`` has the signed relative error in time of every device
    (of every point if there is one device) as predicted from the others."""

    compute_share: float
    memory_share: float
    operation_s: float = 0.0
    exchange_bytes_per_s: float = math.inf
    sharpness: float = 1.0
    devices: tuple[str, ...] = ()
    factors: Mapping[str, float] = field(default_factory=dict)  # of points that were relative, by their name
    leave_one_out: Mapping[str, float] = field(default_factory=dict)

    def seconds(self, load: Load, peaks: Peaks, relative_to: str | None = None) -> float:
        """Predict the time of a step."""
        factor = 1.0 if relative_to is None else self.factors[relative_to]
        return factor * float(step_seconds(features([(load, peaks)]), self.rates(), self.sharpness)[0])

    def rates(self) -> Floats:
        """Return the seconds for one unit of each term."""
        return np.array(
            [
                1 / self.compute_share if self.compute_share else 0.0,
                1 / self.memory_share if self.memory_share else 0.0,
                self.operation_s,
                1 / self.exchange_bytes_per_s,
            ]
        )

    @property
    def error(self) -> float | None:
        """The median absolute error of ``leave_one_out``; None if nothing could be left out."""
        return float(np.median([abs(e) for e in self.leave_one_out.values()])) if self.leave_one_out else None

    @property
    def worst_error(self) -> float | None:
        return max(map(abs, self.leave_one_out.values())) if self.leave_one_out else None

    @property
    def uncertainty(self) -> float:
        """The standard deviation of a prediction's logarithm, by the errors of what was left out."""
        if not self.leave_one_out:
            return UNTESTED
        return math.sqrt(sum(math.log1p(e) ** 2 for e in self.leave_one_out.values()) / len(self.leave_one_out))

    def predict(self, load: Load, peaks: Peaks) -> Prediction:
        """Predict with an interval."""
        origin = f"estimated by a roofline of {', '.join(self.devices) or 'data sheets'}"
        return interval(self.seconds(load, peaks), self.uncertainty, origin)

    def to_json(self) -> dict[str, Any]:
        exchange = None if math.isinf(self.exchange_bytes_per_s) else self.exchange_bytes_per_s
        return {
            **json_fields(self, "compute_share memory_share operation_s"),
            "exchange_bytes_per_s": exchange,
            **json_fields(self, "sharpness devices error worst_error"),
            "leave_one_out": dict(self.leave_one_out),
        }

    @classmethod
    def from_json(cls, document: Any) -> Roofline:
        table = strict.table(document, "roofline")

        def number(name: str, least: float = 0.0) -> float:
            return strict.number(strict.member(table, name), name, least, 1e30)

        exchange = table.get("exchange_bytes_per_s")
        errors = strict.table(table.get("leave_one_out", {}), "leave_one_out")
        return cls(
            compute_share=number("compute_share"),
            memory_share=number("memory_share"),
            operation_s=number("operation_s"),
            sharpness=number("sharpness", 1.0),
            exchange_bytes_per_s=math.inf if exchange is None else strict.number(exchange, "exchange", 1e-30, 1e30),
            devices=tuple(strict.text(d, "a device", 200) for d in strict.array(table.get("devices", []), "devices")),
            leave_one_out={name: strict.number(value, name, -0.999, 1e9) for name, value in errors.items()},
        )


def interval(seconds: float, uncertainty: float, origin: str) -> Prediction:
    """Make a prediction whose logarithm has this standard deviation."""
    factor = math.exp(_SURE * uncertainty)
    return Prediction(seconds=seconds, low_s=seconds / factor, high_s=seconds * factor, origin=origin)


def features(pairs: Sequence[tuple[Load, Peaks]]) -> Floats:
    """Return [point, term]: seconds at the peaks, operations, bytes exchanged."""
    return np.array(
        [
            [
                load.flops / peaks.flops_per_s,
                load.traffic_bytes / peaks.bytes_per_s,
                load.operations,
                load.exchanged_bytes,
            ]
            for load, peaks in pairs
        ],
        dtype=np.float64,
    )


def step_seconds(features: Floats, rates: Floats, sharpness: float) -> Floats:
    parts = features * rates
    busy = np.maximum(parts[:, :2], 1e-300)
    largest = busy.max(axis=1)
    knee = largest * ((busy / largest[:, None]) ** sharpness).sum(axis=1) ** (1 / sharpness)
    return np.asarray(knee + parts[:, 2] + parts[:, 3])
