"""Models of the time that checkpoints take to the memory nodes, and where a node is saturated."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepvm.errors import UsageError
from deepvm.performance.measured import Samples
from deepvm.performance.network.transmission import (
    PAPER_TRANSMISSION_S,
    Transmission,
    TransmissionCurve,
    fit_transmission,
    fit_transmission_curve,
    saturation_points,
)
from deepvm.performance.profile import NetworkPoint

NODES = list(range(1, 8))
SIZE = 64_000_000


def point(workers: int, nodes: int, link: float | None, seconds: float) -> NetworkPoint:
    return NetworkPoint(
        workers=workers, memory_nodes=nodes, link_gbps=link, checkpoint_bytes=SIZE, remote_s=Samples((seconds,))
    )


def measured_by(model: Transmission, links: tuple[float | None, ...] = (1.0, 5.0, 10.0, 25.0)) -> list[NetworkPoint]:
    return [
        point(n, m, link, model.seconds(workers=n, memory_nodes=m, checkpoint_bytes=SIZE, link_gbps=link))
        for link in links
        for n in (1, 2, 4)
        for m in (1, 2, 3, 4)
    ]


def test_the_papers_curve_is_fitted_within_three_percent_at_every_node() -> None:
    found = fit_transmission_curve(NODES, PAPER_TRANSMISSION_S)
    assert found.worst_relative_error < 0.03
    assert found.mean_relative_error < 0.015
    assert found.curve.penalty > 1  # a second node more than halves the time
    assert found.curve.flat_from() == 5


def test_plain_sharing_has_no_penalty_and_a_knee_where_the_workers_links_are_full() -> None:
    true = TransmissionCurve(latency_s=0.03, one_node_s=2.0, knee=4.0)
    found = fit_transmission_curve(NODES, list(true.seconds(NODES)))
    assert found.worst_relative_error < 1e-3
    assert found.curve.penalty == pytest.approx(0, abs=1e-3)
    assert found.curve.knee == pytest.approx(4.0, rel=0.01)


def test_two_points_make_a_curve_without_penalty_or_knee() -> None:
    found = fit_transmission_curve([1, 2], [2.0, 1.1])
    assert (found.curve.penalty, found.curve.knee) == (0.0, math.inf)
    assert found.worst_relative_error < 0.01


@pytest.mark.parametrize(
    ("nodes", "seconds"), [([1], [1.0]), ([1, 2], [1.0]), ([0, 1], [1.0, 1.0]), ([1, 2], [0.0, 1.0]), ([], [])]
)
def test_a_curve_of_too_little_or_impossible_data_is_refused(nodes: list[int], seconds: list[float]) -> None:
    with pytest.raises(UsageError):
        fit_transmission_curve(nodes, seconds)


@pytest.mark.parametrize("penalty", [0.0, 0.6])
def test_a_fit_finds_the_model_that_made_the_points(penalty: float) -> None:
    true = Transmission(latency_s=0.02, usable_share=0.92, penalty=penalty, host_bytes_per_s=1.5e9)
    found = fit_transmission(measured_by(true))
    assert found.worst_relative_error < 0.01
    assert found.held_out_error is not None
    assert found.held_out_error < 0.02
    assert found.model.usable_share == pytest.approx(0.92, rel=0.02)
    assert found.model.host_bytes_per_s == pytest.approx(1.5e9, rel=0.05)
    assert found.model.penalty == pytest.approx(penalty, abs=0.02)


def test_without_limited_links_only_the_host_counts() -> None:
    true = Transmission(latency_s=0.01, usable_share=1.0, penalty=0.0, host_bytes_per_s=1e9)
    found = fit_transmission(measured_by(true, (None,)))
    assert found.model.host_bytes_per_s == pytest.approx(1e9, rel=0.01)
    assert [str(each) for each in saturation_points(measured_by(true, (None,)), found.model)] == [
        "without a limit: this host saturates before a memory node does"
    ]


def test_saturation_is_told_by_link_and_not_where_the_host_hides_it() -> None:
    true = Transmission(latency_s=0.01, usable_share=0.95, penalty=0.0, host_bytes_per_s=1.2e9)
    points = measured_by(true, (1.0, 25.0))
    slow, fast = saturation_points(points, true)
    assert (slow.link_gbps, slow.flat_until, slow.grows_from, slow.host_bound) == (1.0, 1.0, 4 / 3, 0)
    assert fast.host_bound == 12
    assert "this host saturates" in str(fast)
    (only,) = saturation_points([point(4, 1, 1.0, 2.2), point(4, 4, 25.0, 0.3)], true)[:1]
    assert (only.flat_until, only.grows_from) == (None, 4.0)
    assert "saturated by 4 workers" in str(only)
    alone = saturation_points([point(1, 1, 5.0, 0.1), point(1, 2, 5.0, 0.1)], true)
    assert alone[0].grows_from is None
    assert "not saturated by 1 workers" in str(alone[0])


def test_a_model_needs_two_points_and_times_above_zero() -> None:
    with pytest.raises(UsageError, match="at least two points"):
        fit_transmission([point(1, 1, 1.0, 0.5)])
    with pytest.raises(UsageError, match="above zero"):
        fit_transmission([point(1, 1, 1.0, 0.0), point(1, 2, 1.0, 0.5)])
    model = Transmission(latency_s=0.0, usable_share=1.0, penalty=0.0, host_bytes_per_s=math.inf)
    for wrong in ({"workers": 0}, {"memory_nodes": 0}, {"link_gbps": 0.0}, {"checkpoint_bytes": -1.0}):
        with pytest.raises(UsageError):
            model.seconds(**{"workers": 1, "memory_nodes": 1, "checkpoint_bytes": 1.0, "link_gbps": 1.0, **wrong})  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(
    st.floats(0, 1), st.floats(0.05, 1), st.floats(0, 2), st.floats(1e6, 1e11), st.integers(1, 40), st.integers(1, 40)
)
def test_more_nodes_are_never_slower_and_more_workers_never_faster(
    latency: float, share: float, penalty: float, host: float, workers: int, nodes: int
) -> None:
    model = Transmission(latency_s=latency, usable_share=share, penalty=penalty, host_bytes_per_s=host)

    def at(n: int, m: int) -> float:
        return model.seconds(workers=n, memory_nodes=m, checkpoint_bytes=SIZE, link_gbps=5.0)

    assert at(workers, nodes + 1) <= at(workers, nodes) * (1 + 1e-12)
    assert at(workers + 1, nodes) >= at(workers, nodes) * (1 - 1e-12)
    assert at(workers, nodes) >= latency + SIZE / (share * 5e9 / 8) * (1 - 1e-12)


def test_a_curve_needs_one_node_or_more() -> None:
    curve = TransmissionCurve(latency_s=1.0, one_node_s=1.0)
    assert curve.seconds(np.array([1.0, 2.0])).tolist() == [2.0, 1.5]
    assert curve.to_json()["knee"] is None
    with pytest.raises(UsageError):
        curve.seconds([0.5])
