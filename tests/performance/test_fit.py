from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepvm.errors import UnknownName, UsageError
from deepvm.performance import AllReduce, Logistic, UniversalScalability, fit
from tests.support.measured_scaling import MEASURED

NODES = (1, 2, 4, 8, 16, 24, 32, 48)


def seconds_of(curve: Any, one_s: float = 100.0) -> list[float]:
    return [one_s / float(curve.speedup(n)) for n in NODES]


@settings(max_examples=25, deadline=None)
@given(st.floats(0.001, 0.5), st.floats(1e-5, 0.01))
def test_universal_scalability_finds_the_law_that_made_the_points(sigma: float, kappa: float) -> None:
    truth = UniversalScalability(sigma=sigma, kappa=kappa)
    found = fit("universal-scalability", NODES, seconds_of(truth))
    assert found.worst_relative_error < 1e-4
    assert isinstance(found.curve, UniversalScalability)
    assert found.curve.sigma == pytest.approx(sigma, rel=1e-2, abs=1e-4)


@settings(max_examples=25, deadline=None)
@given(st.floats(0.08, 0.3), st.floats(8, 25), st.floats(3, 15))
def test_logistic_finds_the_logistic_that_made_the_points(a: float, b: float, c: float) -> None:
    published = Logistic(a=a, b=b, c=c).published_speedup(NODES)
    found = fit("logistic", NODES, [float(published[0] / s) for s in published])
    # A speedup is 1 at one machine, so what can be found is the truth scaled to that.
    assert isinstance(found.curve, Logistic)
    assert found.worst_relative_error < 1e-3
    assert found.curve.a == pytest.approx(a, rel=1e-2)
    assert found.curve.b == pytest.approx(b, rel=1e-2)


@settings(max_examples=25, deadline=None)
@given(st.floats(0.1, 1), st.floats(1e-4, 0.02), st.sampled_from([0.0, 0.3, 0.8]))
def test_all_reduce_finds_the_network_that_made_the_points(efficiency: float, latency_s: float, overlap: float) -> None:
    truth = AllReduce(
        compute_s=0.1,
        gradient_bytes=200e6,
        sustained_gbps=5,
        efficiency=efficiency,
        latency_s=latency_s,
        overlap=overlap,
    )
    found = fit("all-reduce", NODES, seconds_of(truth), gradient_bytes=200e6, sustained_gbps=5, steps=1000)
    assert found.worst_relative_error < 1e-3
    assert isinstance(found.curve, AllReduce)
    assert found.curve.compute_s == pytest.approx(0.1)
    assert found.curve.efficiency == pytest.approx(efficiency, rel=0.02)
    assert found.curve.latency_s == pytest.approx(latency_s, rel=0.02)


def test_all_reduce_describes_every_measured_machine_within_7_percent() -> None:
    for run in MEASURED.values():
        found = fit(
            "all-reduce",
            run.nodes,
            run.seconds,
            gradient_bytes=run.gradient_bytes,
            sustained_gbps=run.gbps,
            steps=run.steps,
        )
        assert found.worst_relative_error < 0.07
        assert found.curve.measured == (1, 32)
        predicted = found.curve.speedup(run.nodes)
        worst = np.abs(predicted / (run.seconds[0] / np.array(run.seconds)) - 1).max()
        assert found.worst_relative_error == pytest.approx(worst)


def test_fitted_networks_are_those_that_the_defaults_were_chosen_by() -> None:
    for name, efficiency, latency_s, overlap in (
        ("g4dn.xlarge", 0.321, 0.00634, 0.564),
        ("g5.xlarge", 0.437, 0.00400, 1.0),
    ):
        run = MEASURED[name]
        curve = fit(
            "all-reduce",
            run.nodes,
            run.seconds,
            gradient_bytes=run.gradient_bytes,
            sustained_gbps=run.gbps,
            steps=run.steps,
        ).curve
        assert isinstance(curve, AllReduce)
        assert curve.efficiency == pytest.approx(efficiency, rel=0.01)
        assert curve.latency_s == pytest.approx(latency_s, rel=0.01)
        assert curve.overlap == pytest.approx(overlap, rel=0.01)


def test_a_default_network_gives_times_within_25_percent_of_all_that_were_measured() -> None:
    worst = {}
    for name, run in MEASURED.items():
        curve = AllReduce(
            compute_s=run.seconds[0] / run.steps, gradient_bytes=run.gradient_bytes, sustained_gbps=run.gbps
        )
        predicted_s = run.seconds[0] / curve.speedup(run.nodes)
        worst[name] = float(np.abs(predicted_s / np.array(run.seconds) - 1).max())
    assert worst["g4dn.xlarge"] < 0.14
    assert worst["g5.xlarge"] < 0.20
    assert worst["g3s.xlarge"] < 0.25


def test_order_of_the_points_does_not_matter() -> None:
    forward = fit("universal-scalability", [1, 2, 4, 8], [8.0, 5.0, 3.0, 2.0])
    backward = fit("universal-scalability", [8, 4, 2, 1], [2.0, 3.0, 5.0, 8.0])
    assert forward.curve == backward.curve


def test_measured_points_are_kept_as_they_are() -> None:
    found = fit("measured", [4, 1], [3.0, 8.0])
    assert found.worst_relative_error == 0
    assert found.curve.to_spec() == {"model": "measured", "nodes": [1, 4], "seconds": [8.0, 3.0]}


@pytest.mark.parametrize("model", ["logistic", "universal-scalability", "all-reduce"])
@pytest.mark.parametrize(
    ("nodes", "seconds", "says"),
    [
        ([1, 2], [2.0, 1.0], "at least 3"),
        ([], [], "at least 3"),
        ([1, 2, 4], [2.0, 1.0], "2 times"),
        ([2, 4, 8], [3.0, 2.0, 1.0], "measure one machine too"),
        ([1, 2, 2], [3.0, 2.0, 2.0], "twice"),
        ([1, 2, 4], [3.0, 2.0, 0.0], "above 0"),
        ([1, 2, 4], [3.0, 2.0, -1.0], "above 0"),
        ([1, 2, 4], [3.0, 2.0, math.nan], "finite"),
        ([1, 2, math.nan], [3.0, 2.0, 1.0], "finite"),
        ([0, 1, 2], [3.0, 2.0, 1.0], "at least 1"),
        ([1, 2, 2.5], [3.0, 2.0, 1.0], "whole"),
    ],
)
def test_measurements_that_cannot_carry_a_fit_are_refused(
    model: str, nodes: list[Any], seconds: list[float], says: str
) -> None:
    known = {"gradient_bytes": 1e6, "sustained_gbps": 1.0} if model == "all-reduce" else {}
    with pytest.raises(UsageError, match=says):
        fit(model, nodes, seconds, **known)


def test_a_fit_says_what_it_has_to_know() -> None:
    points = ([1, 2, 4], [3.0, 2.0, 1.5])
    with pytest.raises(UnknownName, match="did you mean logistic"):
        fit("logistics", *points)
    with pytest.raises(UsageError, match="give gradient_bytes and sustained_gbps"):
        fit("all-reduce", *points)
    with pytest.raises(UsageError, match="give sustained_gbps"):
        fit("all-reduce", *points, gradient_bytes=1e6)
    with pytest.raises(UsageError, match="sustained_gbps is 0"):
        fit("all-reduce", *points, gradient_bytes=1e6, sustained_gbps=0)
    with pytest.raises(UnknownName, match="did you mean gradient_bytes"):
        fit("all-reduce", *points, gradient_byte=1e6, sustained_gbps=1)
    with pytest.raises(UnknownName, match="steps"):
        fit("logistic", *points, steps=3)


@pytest.mark.parametrize("model", ["logistic", "universal-scalability", "all-reduce"])
@pytest.mark.parametrize("seconds", [[8.0, 4.0, 2.0, 1.0], [8.0, 8.0, 8.0, 8.0], [1.0, 10.0, 20.0, 40.0]])
def test_perfect_flat_and_falling_scaling_all_have_a_fit(model: str, seconds: list[float]) -> None:
    known = {"gradient_bytes": 1e6, "sustained_gbps": 1.0} if model == "all-reduce" else {}
    found = fit(model, [1, 2, 4, 8], seconds, **known)
    assert np.isfinite(found.curve.speedup([1, 2, 4, 8, 1000])).all()
    assert math.isfinite(found.worst_relative_error)
