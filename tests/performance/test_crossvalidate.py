"""The choice among speedup curves, and how honest it is with few points."""

from __future__ import annotations

import numpy as np
import pytest

from deepvm.errors import UsageError
from deepvm.performance import UniversalScalability
from deepvm.performance.crossvalidate import choose_curve
from tests.support.measured_scaling import MEASURED


@pytest.mark.parametrize("instance", MEASURED)
def test_points_that_a_curve_has_not_seen_are_predicted_within_ten_percent(instance: str) -> None:
    points = MEASURED[instance]
    choice = choose_curve(
        points.nodes, points.seconds, gradient_bytes=points.gradient_bytes, sustained_gbps=points.gbps
    )
    assert choice.best.error is not None
    assert choice.best.error < 0.1
    errors = [c.error for c in choice.candidates if c.error is not None]
    assert choice.best.error <= min(errors) + 0.02
    low, high = choice.band(points.nodes)
    speedups = points.seconds[0] / np.asarray(points.seconds)
    assert ((low <= speedups * 1.1) & (speedups <= high * 1.1)).all()


def test_the_law_that_made_the_points_wins() -> None:
    nodes = (1, 2, 4, 8, 16, 32)
    truth = UniversalScalability(sigma=0.05, kappa=0.004)
    choice = choose_curve(nodes, [100 / float(truth.speedup(n)) for n in nodes])
    assert choice.best.name == "universal-scalability"
    assert choice.best.error == pytest.approx(0, abs=1e-3)
    assert "predicts points that it has not seen" in choice.verdict


def test_two_points_test_nothing_and_say_so() -> None:
    choice = choose_curve((1, 2), (10.0, 6.0))
    assert choice.best.name == "measured"  # the one that claims least
    assert choice.best.error is None
    assert choice.verdict.startswith("2 points do not test any curve")
    low, high = choice.band([4])
    assert low[0] == pytest.approx(10 / 6)  # flat beyond the last point
    assert high[0] > 2  # Amdahl's


def test_three_points_test_the_curves_of_one_parameter_only() -> None:
    choice = choose_curve((1, 2, 4), (12.0, 6.6, 3.9), gradient_bytes=1e6)
    tested = {c.name for c in choice.candidates if c.error is not None}
    assert tested == {"amdahl", "measured"}
    assert choice.best.name == "amdahl"
    assert [c.error for c in choice.candidates][-1] is None  # untested ones come last


def test_the_next_point_is_where_candidates_differ_within_what_is_allowed() -> None:
    free = choose_curve((1, 2, 4), (12.0, 6.6, 3.9), most_nodes=64)
    assert free.next_nodes == 64  # extrapolations differ most
    assert choose_curve((1, 2, 4), (12.0, 6.6, 3.9), most_nodes=4).next_nodes == 3
    assert choose_curve((1, 2), (12.0, 6.6), most_nodes=2).next_nodes is None


def test_noise_lets_the_simpler_of_two_curves_win() -> None:
    nodes = (1, 2, 4, 8, 16)
    wobbly = [s * w for s, w in zip((100, 52, 28, 16, 10), (1, 1.04, 0.97, 1.03, 0.98), strict=True)]
    choice = choose_curve(nodes, wobbly, noise=0.2)
    assert choice.best.name == "amdahl"


def test_times_that_no_curve_describes_still_have_an_answer() -> None:
    choice = choose_curve((1, 2, 3, 4, 5), (1.0, 50.0, 0.2, 70.0, 0.1), gradient_bytes=4e6)
    assert choice.best.error is not None
    assert choice.best.error > 0.5  # and it tells
    assert np.isfinite(choice.band([1, 2, 100])[1]).all()


@pytest.mark.parametrize(
    ("nodes", "seconds", "message"),
    [
        ((2, 4), (1.0, 0.5), "measure one machine too"),
        ((1,), (1.0,), "at least 2 node counts"),
        ((1, 2), (1.0, 0.0), "time in seconds"),
        ((1, 2), (1.0, float("nan")), "time in seconds"),
        ((1, 2, 2), (1.0, 0.5, 0.5), "measured twice"),
    ],
)
def test_points_that_are_none_are_refused(nodes: tuple[int, ...], seconds: tuple[float, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        choose_curve(nodes, seconds)
