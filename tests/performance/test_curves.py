from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepvm.catalog import load
from deepvm.errors import UnknownName, UsageError
from deepvm.performance import (
    AllReduce,
    Logistic,
    MeasuredPoints,
    SpeedupCurve,
    UniversalScalability,
    allreduce_speedup,
    curve_from_spec,
)
from tests.support.measured_scaling import MEASURED

ranges = st.none() | st.tuples(st.integers(1, 50), st.integers(50, 500))
times_s = st.floats(1e-3, 1e5)
logistics = st.builds(Logistic, a=st.floats(1e-4, 50), b=st.floats(-100, 200), c=st.floats(1e-3, 1e3), measured=ranges)
laws = st.builds(UniversalScalability, sigma=st.floats(0, 5), kappa=st.floats(0, 5), measured=ranges)
reduces = st.builds(
    AllReduce,
    compute_s=st.floats(1e-4, 100),
    gradient_bytes=st.floats(0, 1e12),
    sustained_gbps=st.floats(0.01, 3200),
    latency_s=st.floats(0, 0.1),
    overlap=st.floats(0, 1),
    efficiency=st.floats(0.01, 1),
    measured=ranges,
)


@st.composite
def points(draw: st.DrawFn) -> MeasuredPoints:
    more = draw(st.lists(st.integers(2, 1000), min_size=1, max_size=9, unique=True))
    nodes = (1, *sorted(more))
    seconds = draw(st.lists(times_s, min_size=len(nodes), max_size=len(nodes)))
    return MeasuredPoints(nodes=nodes, seconds=tuple(seconds))


every_curve = st.one_of(logistics, laws, reduces, points())
WIDE = np.unique(np.geomspace(1, 100_000, 200).round())


@given(every_curve)
def test_every_curve_is_finite_and_not_negative_up_to_100000_nodes(curve: SpeedupCurve) -> None:
    for values in (curve.speedup(WIDE), curve.scaling(WIDE)):
        assert values.shape == WIDE.shape
        assert values.dtype == np.float64
        assert np.isfinite(values).all()
        assert (values >= 0).all()


@given(st.one_of(laws, reduces, points()))
def test_one_machine_is_exactly_as_fast_as_itself(curve: SpeedupCurve) -> None:
    assert curve.speedup(1) == 1.0
    assert curve.scaling([1, 2])[0] == 1.0


@given(every_curve, st.integers(1, 100_000))
def test_speedup_is_nodes_times_scaling_one_by_one_as_all_at_once(curve: SpeedupCurve, nodes: int) -> None:
    assert float(curve.speedup(nodes)) == pytest.approx(nodes * float(curve.scaling(nodes)))
    assert curve.speedup(np.array([[nodes, 1], [1, nodes]]))[1, 1] == curve.speedup(nodes)


@given(every_curve)
def test_a_curve_read_back_from_its_json_is_the_same(curve: SpeedupCurve) -> None:
    back = curve_from_spec(json.loads(json.dumps(curve.to_spec())))
    assert back == curve
    assert back.measured == curve.measured
    assert np.array_equal(back.speedup(WIDE), curve.speedup(WIDE))


@pytest.mark.parametrize(
    "curve",
    [
        Logistic(a=1e308, b=-1e308, c=1e308),
        Logistic(a=1e308, b=1e308, c=1),
        UniversalScalability(sigma=1e308, kappa=1e308),
        AllReduce(compute_s=1e-300, gradient_bytes=1e300, sustained_gbps=1e-300),
    ],
)
def test_absurd_parameters_overflow_nothing(curve: SpeedupCurve) -> None:
    assert np.isfinite(curve.speedup(WIDE)).all()
    assert np.isfinite(curve.scaling(WIDE)).all()


@pytest.mark.parametrize("nodes", [0, 0.5, -3, math.nan, math.inf, [1, 2, 0]])
def test_less_than_one_node_has_no_speedup(nodes: Any) -> None:
    for curve in (
        Logistic(a=0.1, b=10, c=5),
        UniversalScalability(sigma=0, kappa=0),
        AllReduce(compute_s=1, gradient_bytes=1, sustained_gbps=1),
        MeasuredPoints(nodes=(1, 2), seconds=(2, 1)),
    ):
        with pytest.raises(UsageError, match="node counts of 1 and more"):
            curve.speedup(nodes)


# The published logistic


def test_published_scaling_factor_gives_the_published_performance_of_17_nodes_of_type_d() -> None:
    d = curve_from_spec(load("paper-virtual").instance("D").speedup or {})
    assert 700 * 17 * float(d.scaling(17)) == pytest.approx(11230.6, abs=0.05)
    assert 700 * float(d.speedup(17)) == pytest.approx(11230.6, abs=0.05)


@given(logistics)
def test_scaling_factor_is_one_up_to_b_and_logistic_over_tangent_beyond(curve: Logistic) -> None:
    n = np.arange(1.0, 256.0)
    logistic = curve.c / (1 + np.exp(np.minimum(700, -curve.a * (n - curve.b))))
    tangent = curve.c * curve.a / 4 * (n - curve.b) + curve.c / 2
    beyond = n > curve.b
    np.testing.assert_allclose(curve.published_speedup(n), logistic, rtol=1e-9, atol=1e-290)
    np.testing.assert_allclose(curve.scaling(n)[beyond], logistic[beyond] / tangent[beyond], rtol=1e-9)
    assert (curve.scaling(n)[~beyond] == 1).all()


# Measured points


def test_measured_times_come_back_exactly() -> None:
    for run in MEASURED.values():
        curve = MeasuredPoints(nodes=run.nodes, seconds=run.seconds)
        assert curve.measured == (1, 32)
        assert curve.speedup(run.nodes).tolist() == [run.seconds[0] / s for s in run.seconds]


@given(points())
def test_between_two_points_a_curve_stays_between_them_and_beyond_the_last_it_holds(
    curve: MeasuredPoints,
) -> None:
    at = curve.speedup(curve.nodes)
    for (left, right), low, high in zip(
        zip(curve.nodes, curve.nodes[1:], strict=False),
        np.minimum(at[1:], at[:-1]),
        np.maximum(at[1:], at[:-1]),
        strict=True,
    ):
        between = curve.speedup(np.linspace(left, right, 17))
        slack = 1e-9 * high
        assert (between >= low - slack).all()
        assert (between <= high + slack).all()
    assert (curve.speedup([curve.nodes[-1] + 1, 10**6]) == at[-1]).all()


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the first example may have to import scipy
@given(st.lists(times_s, min_size=2, max_size=10, unique=True), st.booleans())
def test_monotone_points_give_a_monotone_curve(seconds: list[float], faster: bool) -> None:
    ordered = sorted(seconds, reverse=faster)
    curve = MeasuredPoints(nodes=tuple(2**i for i in range(len(ordered))), seconds=tuple(ordered))
    steps = np.diff(curve.speedup(np.linspace(1, curve.nodes[-1], 400)))
    tolerance = 1e-9 * float(curve.speedup(curve.nodes).max())
    assert ((steps if faster else -steps) >= -tolerance).all()


@pytest.mark.parametrize(
    ("nodes", "seconds", "says"),
    [
        ((2, 4), (2.0, 1.0), "measure one machine too"),
        ((1,), (2.0,), "at least two"),
        ((1, 2), (2.0,), "1 times"),
        ((1, 2, 2), (3.0, 2.0, 1.0), "ascend"),
        ((1, 4, 2), (3.0, 2.0, 1.0), "ascend"),
        ((1, 2.5), (2.0, 1.0), "whole"),
        ((0, 1), (2.0, 1.0), "at least 1"),
        ((1, 2), (2.0, 0.0), "above 0"),
        ((1, 2), (2.0, math.nan), "finite"),
        ((1, 2), (1e300, 1e-300), "too far apart"),
        ("12", (2.0, 1.0), "list"),
        (3, (2.0, 1.0), "list"),
    ],
)
def test_points_that_say_nothing_about_scaling_are_refused(nodes: Any, seconds: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        MeasuredPoints(nodes=nodes, seconds=seconds)


# All-reduce and the universal law


def test_all_reduce_adds_up_as_its_formula_says() -> None:
    curve = AllReduce(
        compute_s=0.2, gradient_bytes=50e6, sustained_gbps=5, latency_s=0.001, overlap=0.25, efficiency=0.5
    )
    comm_s = 2 * 3 / 4 * 50e6 * 8 / (5e9 * 0.5) + 2 * 3 * 0.001
    assert float(curve.speedup(4)) == pytest.approx(4 * 0.2 / (0.2 + comm_s - 0.25 * 0.2))


def test_communication_hidden_behind_compute_is_free() -> None:
    curve = AllReduce(compute_s=1, gradient_bytes=1e6, sustained_gbps=10, latency_s=0, overlap=0.5)
    assert curve.speedup([1, 2, 64]).tolist() == [1, 2, 64]


@given(reduces, st.floats(1.1, 10))
def test_all_reduce_never_beats_linear_and_never_loses_by_a_faster_network(curve: AllReduce, factor: float) -> None:
    spec = {**curve.to_spec(), "sustained_gbps": curve.sustained_gbps * factor}
    assert (curve.speedup(WIDE) <= WIDE * (1 + 1e-12)).all()
    assert (curve_from_spec(spec).speedup(WIDE) >= curve.speedup(WIDE) * (1 - 1e-12)).all()


def test_all_reduce_of_many_types_at_once_is_that_of_each() -> None:
    compute_s, gbps = np.array([[0.1], [0.2], [0.4]]), np.array([[1.0], [math.nan], [25.0]])
    n = np.arange(1, 40)
    table = allreduce_speedup(n, compute_s=compute_s, gradient_bytes=1e8, sustained_gbps=gbps)
    assert table.shape == (3, 39)
    for row in (0, 2):
        one = AllReduce(compute_s=compute_s[row, 0], gradient_bytes=1e8, sustained_gbps=gbps[row, 0])
        assert np.array_equal(table[row], one.speedup(n))
    assert table[1, 0] == 1  # one machine needs no network
    assert np.isnan(table[1, 1:]).all()  # what is unknown stays unknown


def test_universal_scalability_has_amdahl_as_its_limit() -> None:
    assert float(UniversalScalability(sigma=0.05, kappa=0).speedup(100_000)) == pytest.approx(20, rel=1e-3)
    peaked = UniversalScalability(sigma=0.02, kappa=0.0005).speedup(np.arange(1, 200))
    assert np.argmax(peaked) + 1 == round(math.sqrt((1 - 0.02) / 0.0005))


# Specs


@pytest.mark.parametrize(
    ("spec", "error", "says"),
    [
        ({"model": "logisitc", "a": 1, "b": 1, "c": 1}, UnknownName, "did you mean logistic"),
        ({"a": 1, "b": 1, "c": 1}, UsageError, "needs a model"),
        ({"model": 3}, UsageError, "needs a model"),
        ([], UsageError, "needs a model"),
        ({"model": "logistic", "a": 1, "b": 1}, UsageError, "needs c too"),
        ({"model": "logistic", "a": 1, "b": 1, "c": 1, "d": 1}, UnknownName, "'d'"),
        ({"model": "logistic", "a": "1", "b": 1, "c": 1}, UsageError, "a is '1'"),
        ({"model": "logistic", "a": True, "b": 1, "c": 1}, UsageError, "a is True"),
        ({"model": "logistic", "a": -1, "b": 1, "c": 1}, UsageError, "above 0"),
        ({"model": "logistic", "a": 10**400, "b": 1, "c": 1}, UsageError, "finite"),
        ({"model": "logistic", "a": None, "b": 1, "c": 1}, UsageError, "a is None"),
        ({"model": "logistic", "a": 1, "b": 1, "c": 1, "measured": [8, 2]}, UsageError, "first"),
        ({"model": "logistic", "a": 1, "b": 1, "c": 1, "measured": [1.5, 2]}, UsageError, "whole"),
        ({"model": "logistic", "a": 1, "b": 1, "c": 1, "measured": 8}, UsageError, "lowest"),
        ({"model": "universal-scalability", "sigma": -0.1, "kappa": 0}, UsageError, "sigma"),
        ({"model": "measured", "nodes": [1, 2], "seconds": [2, "1"]}, UsageError, "seconds"),
        ({"model": "measured", "nodes": [1, 2], "seconds": [2, 1], "_speedups": 1}, UnknownName, "_speedups"),
        (
            {"model": "all-reduce", "compute_s": 1, "gradient_bytes": 1, "sustained_gbps": 1, "overlap": 1.5},
            UsageError,
            "at most 1",
        ),
    ],
)
def test_a_malformed_spec_is_refused_in_one_sentence(spec: Any, error: type[UsageError], says: str) -> None:
    with pytest.raises(error, match=says) as caught:
        curve_from_spec(spec)
    assert "\n" not in str(caught.value)


def test_every_curve_of_the_built_in_catalogues_can_be_read() -> None:
    read = [
        curve_from_spec(instance.speedup)
        for name in ("paper-virtual", "paper-aws-2023", "aws-2026-08")
        for instance in load(name).instances
        if instance.speedup is not None
    ]
    assert len(read) >= 13


def test_importing_the_room_does_not_import_scipy() -> None:
    program = "import sys, deepvm.performance; sys.exit('scipy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "allowed", "refused"),
    [
        ("compute_s", [1e-9, 5.0], [0.0, -1.0]),
        ("gradient_bytes", [0.0, 1.0], [-1e-9]),
        ("sustained_gbps", [1e-9, 0.5], [0.0]),
        ("latency_s", [0.0, 0.5], [-1e-9]),
        ("overlap", [0.0, 1.0], [-1e-9, 1.001]),
        ("efficiency", [1e-9, 1.0], [0.0, 1.001]),
    ],
)
def test_all_reduce_takes_what_its_formula_can_use(name: str, allowed: list[float], refused: list[float]) -> None:
    usual = {"compute_s": 0.2, "gradient_bytes": 50e6, "sustained_gbps": 5.0}
    for value in allowed:
        assert getattr(AllReduce(**{**usual, name: value}), name) == value
    for value in refused:
        with pytest.raises(UsageError, match=name):
            AllReduce(**{**usual, name: value})
