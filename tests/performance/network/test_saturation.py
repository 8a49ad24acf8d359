from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deepvm.errors import UsageError
from deepvm.performance import (
    bandwidth_memory_nodes,
    estimate_sustained_gbps,
    table_memory_nodes,
    table_workers,
)

TABLE = {0.3: 2, 1.7: 12, 5: 16, 10: 20, 12.5: 24, 15: 24, 25: 28, 30: 32}


def test_rows_of_the_published_table_are_exact() -> None:
    assert table_workers(list(TABLE)).tolist() == list(TABLE.values())


@pytest.mark.parametrize(
    ("gbps", "workers"), [(0, 0), (0.15, 1), (1.0, 7), (7.5, 18), (13, 24), (20, 26), (30.1, 32), (3200, 32)]
)
def test_between_rows_it_is_linear_below_proportional_and_above_held(gbps: float, workers: float) -> None:
    assert float(table_workers(gbps)) == pytest.approx(workers, rel=1e-12)


@given(st.lists(st.floats(0, 100), min_size=2))
def test_more_bandwidth_never_serves_fewer_workers(gbps: list[float]) -> None:
    assert (np.diff(table_workers(sorted(gbps))) >= 0).all()


def test_unknown_bandwidth_stays_unknown() -> None:
    nan = math.nan
    assert np.isnan(table_workers([nan, 5])).tolist() == [True, False]
    assert np.isnan(table_memory_nodes([16, 16], [nan, 5])).tolist() == [True, False]
    assert np.isnan(table_memory_nodes([nan, 16], 5)).tolist() == [True, False]
    assert np.isnan(bandwidth_memory_nodes(1e9, 60, [nan, 5])).tolist() == [True, False]
    assert np.isnan(estimate_sustained_gbps([nan, 4])).tolist() == [True, False]


@pytest.mark.parametrize("row", TABLE.items())
def test_a_node_is_saturated_at_its_limit_and_not_below(row: tuple[float, int]) -> None:
    gbps, limit = row
    assert float(table_memory_nodes(limit - 1, gbps)) == 1
    assert float(table_memory_nodes(limit, gbps)) == 2
    assert float(table_memory_nodes(2 * limit - 1, gbps)) == 2
    assert float(table_memory_nodes(2 * limit, gbps)) == 3


def exact_workers(gbps: Fraction) -> Fraction:
    rows = [(Fraction(str(rate)), Fraction(workers)) for rate, workers in TABLE.items()]
    for (low, fewer), (high, more) in zip([(Fraction(0), Fraction(0)), *rows], rows, strict=False):
        if gbps <= high:
            return fewer + (gbps - low) * (more - fewer) / (high - low)
    return rows[-1][1]


@given(st.integers(0, 10_000), st.integers(1, 4000))
@example(workers=103, hundredths_gbps=105)  # a quotient that is whole, and in floats is not
@example(workers=1, hundredths_gbps=5)
def test_memory_nodes_are_the_fewest_that_stay_strictly_below_saturation(workers: int, hundredths_gbps: int) -> None:
    limit = exact_workers(Fraction(hundredths_gbps, 100))
    nodes = int(table_memory_nodes(workers, hundredths_gbps / 100))
    assert nodes >= 1
    assert Fraction(workers, nodes) < limit
    assert nodes == 1 or Fraction(workers, nodes - 1) >= limit


def test_memory_nodes_are_found_for_a_whole_table_of_workers_and_bandwidths() -> None:
    table = table_memory_nodes(np.array([1, 17, 255]), np.array([[10.0], [30.0], [0.0]]))
    assert table.tolist() == [[1, 1, 13], [1, 1, 8], [math.inf] * 3]
    assert float(table_memory_nodes(0, 0)) == 1


@pytest.mark.parametrize(
    ("checkpoint_bytes", "interval_s", "gbps", "utilisation", "nodes"),
    [
        (300e6, 60, 1.25, 0.5, 1),
        (1.25e9, 10, 1, 1.0, 1),  # exactly what one node takes
        (1.25e9, 10, 1, 0.5, 2),
        (1.25e9 + 1, 10, 1, 0.5, 3),
        (1.5e9, 0.7 - 0.4, 1, 0.5, 80),  # the interval is 0.3 but for its rounding, which costs no node
        (0, 1, 1, 0.5, 1),
        (0, 1, 0, 0.5, 1),
        (1, 1, 0, 0.5, math.inf),
        (1e12, math.inf, 1, 0.5, 1),
    ],
)
def test_checkpoints_fit_into_their_share_of_the_bandwidth(
    checkpoint_bytes: float, interval_s: float, gbps: float, utilisation: float, nodes: float
) -> None:
    assert float(bandwidth_memory_nodes(checkpoint_bytes, interval_s, gbps, utilisation)) == nodes


@given(st.integers(0, 10**13), st.floats(0.1, 1e5), st.floats(0.1, 400), st.floats(0.05, 1))
def test_memory_nodes_by_bandwidth_are_the_fewest_that_can_receive_in_time(
    size: int, interval_s: float, gbps: float, utilisation: float
) -> None:
    nodes = float(bandwidth_memory_nodes(size, interval_s, gbps, utilisation))

    def capacity_bytes(count: float) -> float:
        return count * gbps * 1e9 / 8 * utilisation * interval_s

    assert nodes >= 1
    assert capacity_bytes(nodes) >= size * (1 - 1e-9)
    assert nodes == 1 or capacity_bytes(nodes - 1) < size * (1 + 1e-9)


@pytest.mark.parametrize(("vcpus", "published_gbps"), [(4, 1.25), (4, 1.024), (4, 1.562)])
def test_estimated_bandwidth_is_a_floor_under_what_ec2_publishes(vcpus: float, published_gbps: float) -> None:
    assert float(estimate_sustained_gbps(vcpus)) == 1.0 <= published_gbps


def test_figures_that_cannot_be_are_refused() -> None:
    with pytest.raises(UsageError, match="bandwidth"):
        table_workers([1, -1])
    with pytest.raises(UsageError, match="workers"):
        table_memory_nodes(-1, 1)
    with pytest.raises(UsageError, match="utilisation"):
        bandwidth_memory_nodes(1, 1, 1, 0)
    with pytest.raises(UsageError, match="interval"):
        bandwidth_memory_nodes(1, 0, 1)
    with pytest.raises(UsageError, match="size"):
        bandwidth_memory_nodes(-1, 1, 1)
    with pytest.raises(UsageError, match="vCPUs"):
        estimate_sustained_gbps(0)
