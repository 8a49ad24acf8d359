"""Makespans of five clusters that were really run, at a budget of $3 per hour, against what each model
predicts.

All ratios are to the first cluster, 17 g4dn.xlarge. The curves know one epoch of ResNet-18 by number of
nodes; the makespans are of 30 epochs of ResNet-50.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from deepvm.catalog import load
from deepvm.performance import AllReduce, Logistic, SpeedupCurve, curve_from_spec, fit
from tests.support.measured_scaling import MEASURED, Measured

FIRST_S = 251.25
CLUSTERS = [
    ("g4dn.xlarge", 17, 252.13),
    ("g4dn.xlarge", 17, 251.13),
    ("g4dn.xlarge", 16, 296.77),
    ("g5.xlarge", 7, 493.93),
]
Predict = Callable[[str, int], float]


def worst_error(epoch_s: Predict) -> float:
    first_s = epoch_s("g4dn.xlarge", 17)
    return max(abs(epoch_s(name, count) / first_s / (makespan_s / FIRST_S) - 1) for name, count, makespan_s in CLUSTERS)


def fitted(model: str, run: Measured) -> SpeedupCurve:
    known = (
        {"gradient_bytes": run.gradient_bytes, "sustained_gbps": run.gbps, "steps": run.steps}
        if model == "all-reduce"
        else {}
    )
    return fit(model, run.nodes, run.seconds, **known).curve


def from_curves(curves: dict[str, SpeedupCurve]) -> Predict:
    return lambda name, count: MEASURED[name].seconds[0] / float(curves[name].speedup(count))


@pytest.mark.parametrize("model", ["measured", "all-reduce"])
def test_a_curve_from_measurements_predicts_every_cluster_within_12_percent(model: str) -> None:
    curves = {name: fitted(model, run) for name, run in MEASURED.items()}
    assert worst_error(from_curves(curves)) < 0.12


def test_interpolated_times_are_those_of_a_cubic_that_keeps_the_shape() -> None:
    epoch_s = from_curves({name: fitted("measured", run) for name, run in MEASURED.items()})
    assert epoch_s("g4dn.xlarge", 17) == pytest.approx(15.69, abs=0.01)
    assert epoch_s("g4dn.xlarge", 16) / epoch_s("g4dn.xlarge", 17) == pytest.approx(1.041, abs=0.001)
    assert epoch_s("g5.xlarge", 7) == pytest.approx(33.5, abs=0.05)
    assert worst_error(epoch_s) == pytest.approx(0.1185, abs=0.0005)


def test_the_logistic_itself_predicts_within_12_percent() -> None:
    def epoch_s(name: str, count: int) -> float:
        curve = fitted("logistic", MEASURED[name])
        assert isinstance(curve, Logistic)
        return MEASURED[name].seconds[0] / float(curve.published_speedup(count))

    assert worst_error(epoch_s) < 0.12


def test_the_published_model_is_off_by_a_third() -> None:
    catalog = load("paper-aws-2023")

    def epoch_s(name: str, count: int) -> float:
        instance = catalog.instance(name)
        scaling = float(curve_from_spec(instance.speedup or {}).scaling(count))
        return 1.0 / ((instance.eflops or 0.0) * count * scaling)

    assert epoch_s("g5.xlarge", 7) / epoch_s("g4dn.xlarge", 17) == pytest.approx(1.31, abs=0.005)
    assert worst_error(epoch_s) == pytest.approx(0.334, abs=0.005)


def test_universal_scalability_cannot_describe_a_dip_at_two_nodes() -> None:
    curves = {name: fitted("universal-scalability", run) for name, run in MEASURED.items()}
    assert worst_error(from_curves(curves)) > 0.3


def test_a_default_network_without_any_scaling_measurement_is_off_by_half_of_the_published_model() -> None:
    curves: dict[str, SpeedupCurve] = {
        name: AllReduce(
            compute_s=run.seconds[0] / run.steps, gradient_bytes=run.gradient_bytes, sustained_gbps=run.gbps
        )
        for name, run in MEASURED.items()
    }
    assert worst_error(from_curves(curves)) < 0.175
