"""NVLink, PCIe and EFA: laws of the all-reduce, and published times of nccl-tests."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepvm.errors import UsageError
from deepvm.performance import (
    AllReduce,
    ClusterAllReduce,
    allreduce_s,
    allreduce_speedup,
    compute_share,
    curve_from_spec,
    inside_gbytes_per_s,
)
from deepvm.performance.cluster.interconnect import EFA, INSIDE, NVLINK, PCIE, TCP

WIDE = np.unique(np.geomspace(1, 10_000, 60).round())
GIB = 2**30
links = st.fixed_dictionaries(
    {
        "gradient_bytes": st.floats(0, 1e12),
        "sustained_gbps": st.floats(0.01, 6400),
        "latency_s": st.floats(0, 0.1),
        "efficiency": st.floats(0.01, 1),
        "gpus": st.sampled_from([1.0, 2.0, 4.0, 8.0, 16.0]),
        "inside_gbytes_per_s": st.floats(0.1, 2000),
        "inside_latency_s": st.floats(0, 0.001),
    }
)
steps = st.floats(1e-4, 100)


@given(links, steps, st.floats(0, 1))
def test_no_cluster_is_above_linear_and_one_machine_is_as_fast_as_itself(
    figures: dict[str, float], compute_s: float, overlap: float
) -> None:
    speedup = allreduce_speedup(WIDE, compute_s=compute_s, overlap=overlap, **figures)
    assert (speedup <= WIDE * (1 + 1e-12)).all()
    assert (speedup >= 0).all()
    assert speedup[0] == 1.0
    assert 0 < compute_share(compute_s=compute_s, overlap=overlap, **figures) <= 1


@given(links, steps, st.sampled_from(["sustained_gbps", "inside_gbytes_per_s"]), st.floats(1, 100))
def test_more_bandwidth_and_less_latency_are_never_slower(
    figures: dict[str, float], compute_s: float, which: str, factor: float
) -> None:
    faster = {**figures, which: figures[which] * factor}
    quicker = {**figures, "latency_s": figures["latency_s"] / factor}
    assert (allreduce_s(WIDE, **faster) <= allreduce_s(WIDE, **figures)).all()
    assert (allreduce_s(WIDE, **quicker) <= allreduce_s(WIDE, **figures)).all()
    network = {**figures, "sustained_gbps": figures["sustained_gbps"] * factor}
    before = allreduce_speedup(WIDE, compute_s=compute_s, **figures)
    assert (allreduce_speedup(WIDE, compute_s=compute_s, **network) >= before * (1 - 1e-12)).all()


@given(links)
def test_the_hops_of_both_rings_add_up_and_the_slower_ring_decides(figures: dict[str, float]) -> None:
    n, g, f = WIDE, figures["gpus"], figures
    between_s = 2 * (n - 1) / n * (f["gradient_bytes"] * 8e-9 / f["sustained_gbps"] / f["efficiency"])
    inside_s = 2 * (g - 1) / g * (f["gradient_bytes"] * 1e-9 / f["inside_gbytes_per_s"])
    hops_s = 2 * (n - 1) * f["latency_s"] + 2 * (g - 1) * f["inside_latency_s"]
    np.testing.assert_allclose(allreduce_s(n, **figures), np.maximum(between_s, inside_s) + hops_s, rtol=1e-12)


def test_figures_that_are_not_needed_may_be_unknown() -> None:
    known = {"gradient_bytes": 1e9, "sustained_gbps": 8.0, "latency_s": 0.25, "efficiency": 0.5}
    assert allreduce_s(1, **{**known, "sustained_gbps": np.nan, "latency_s": np.nan}) == 0
    assert allreduce_s(2, **known, gpus=1, inside_gbytes_per_s=np.nan, inside_latency_s=np.nan) == 2.5
    assert np.isnan(allreduce_s(2, **known, gpus=2, inside_gbytes_per_s=np.nan))


@settings(deadline=None)
@given(links, steps, st.floats(0, 1))
def test_machines_of_one_gpu_have_the_plain_ring_whatever_their_links_inside(
    figures: dict[str, float], compute_s: float, overlap: float
) -> None:
    one = {**figures, "gpus": 1.0}
    inside = ("gpus", "inside_gbytes_per_s", "inside_latency_s")
    plain = AllReduce(
        compute_s=compute_s, overlap=overlap, **{name: v for name, v in figures.items() if name not in inside}
    )
    assert np.array_equal(allreduce_speedup(WIDE, compute_s=compute_s, overlap=overlap, **one), plain.speedup(WIDE))
    n, f = WIDE, one
    ring_s = 2 * (n - 1) / n * (f["gradient_bytes"] * 8e-9 / f["sustained_gbps"] / f["efficiency"])
    expected = n / (1 + np.maximum(0, (ring_s + 2 * (n - 1) * f["latency_s"]) / compute_s - overlap))
    np.testing.assert_allclose(plain.speedup(n), expected, rtol=1e-12)
    assert compute_share(compute_s=compute_s, overlap=overlap, **one) == 1
    assert allreduce_s(1, **one) == 0


@given(links)
def test_an_all_reduce_takes_no_less_time_on_more_machines(figures: dict[str, float]) -> None:
    seconds = allreduce_s(WIDE, **figures)
    assert (np.diff(seconds) >= -1e-12 * seconds[1:]).all()


def test_unknown_links_are_unknown_only_where_they_are_used() -> None:
    known = {"gradient_bytes": 1e8, "sustained_gbps": 10.0, "gpus": np.array([[1.0], [8.0]])}
    no_inside = allreduce_s([1, 2], **known, inside_gbytes_per_s=math.nan)
    assert np.isnan(no_inside).tolist() == [[False, False], [True, True]]
    no_network = allreduce_s([1, 2], **{**known, "sustained_gbps": math.nan}, inside_gbytes_per_s=100.0)
    assert np.isnan(no_network).tolist() == [[False, True], [False, True]]
    speedup = allreduce_speedup([1, 2], compute_s=1.0, **known, inside_gbytes_per_s=math.nan)
    assert speedup[:, 0].tolist() == [1, 1]
    assert np.isnan(speedup[:, 1]).tolist() == [False, True]


def test_the_slower_of_network_and_links_inside_decides() -> None:
    figures: dict[str, Any] = {"gradient_bytes": 1e9, "gpus": 4.0, "latency_s": 0.0, "inside_latency_s": 0.0}
    inside_s, between_s = 2 * 3 / 4 * 1e9 / 10e9, 2 * 1 / 2 * 1e9 * 8 / (100e9 * 0.5)
    slow_inside = allreduce_s(2, **figures, inside_gbytes_per_s=10.0, sustained_gbps=100.0, efficiency=0.5)
    assert float(slow_inside) == pytest.approx(max(inside_s, between_s))
    fast_inside = allreduce_s(2, **figures, inside_gbytes_per_s=1000.0, sustained_gbps=100.0, efficiency=0.5)
    assert float(fast_inside) == pytest.approx(between_s)


# Published all-reduces of nccl-tests: machines, GPUs each, bytes, seconds, and how near the model comes.


def p4d_s(machines: int, size: float) -> float:
    return float(
        allreduce_s(
            machines,
            gradient_bytes=size,
            gpus=8,
            inside_gbytes_per_s=inside_gbytes_per_s(NVLINK, 600),
            inside_latency_s=NVLINK.latency_s,
            sustained_gbps=400,
            efficiency=EFA.efficiency,
            latency_s=EFA.latency_s,
        )
    )


@pytest.mark.parametrize(
    ("machines", "measured_s", "within"), [(1, 8.1426e-3, 0.01), (2, 35.215e-3, 0.05), (3, 64.782e-3, 0.3),
                                           (4, 70.253e-3, 0.3)]
)  # fmt: skip
def test_a_gibibyte_over_a100_machines_takes_about_what_was_published(
    machines: int, measured_s: float, within: float
) -> None:
    assert p4d_s(machines, GIB) == pytest.approx(measured_s, rel=within)  # github.com/NVIDIA/nccl/issues/527


@pytest.mark.parametrize(("machines", "measured_s"), [(1, 13.8e-6), (2, 163e-6), (4, 319e-6), (8, 631e-6)])
def test_eight_bytes_over_efa_take_about_what_was_published(machines: int, measured_s: float) -> None:
    assert p4d_s(machines, 8) == pytest.approx(measured_s, rel=0.4)  # p3dn.24xlarge, 2019


def test_bus_bandwidths_of_data_sheets_are_near_published_ones() -> None:
    assert inside_gbytes_per_s(NVLINK, 600) == pytest.approx(230, rel=0.05)  # A100
    assert 0.7 * 450 < inside_gbytes_per_s(NVLINK, 900) <= 450  # H100, of which the switches add up
    assert inside_gbytes_per_s(PCIE, 128) == pytest.approx(28, rel=0.05)  # 8 × RTX 5090
    assert inside_gbytes_per_s(PCIE, 32) < 10  # PCIe 3
    for gbps, reported_gbytes_per_s in ((400, 40), (3200, 350)):  # p4d and p5 with today's software
        assert 0.6 * reported_gbytes_per_s < gbps / 8 * EFA.efficiency <= reported_gbytes_per_s


def test_three_links_are_three_all_reduces() -> None:
    sizes: dict[str, Any] = {"gradient_bytes": 1e8, "gpus": 8, "sustained_gbps": 100}
    nvlink, pcie = (
        float(allreduce_s(1, **sizes, inside_gbytes_per_s=inside_gbytes_per_s(kind, sheet)))
        for kind, sheet in ((NVLINK, 600), (PCIE, 64))
    )
    efa, tcp = (
        float(allreduce_s(16, **sizes, latency_s=kind.latency_s, efficiency=kind.efficiency)) for kind in (EFA, TCP)
    )
    assert nvlink < 0.1 * pcie
    assert pcie < efa < 0.2 * tcp


def test_a_cluster_curve_is_read_back_and_never_overflows() -> None:
    curve = ClusterAllReduce(
        compute_s=0.1, gradient_bytes=1e8, gpus=8, inside_gbytes_per_s=14, sustained_gbps=100, measured=(1, 4)
    )
    assert curve_from_spec(json.loads(json.dumps(curve.to_spec()))) == curve
    assert curve.scaling(1) == 1
    absurd = ClusterAllReduce(
        compute_s=1e-300, gradient_bytes=1e300, gpus=8, inside_gbytes_per_s=1e-300, sustained_gbps=1e-300
    )
    assert np.isfinite(absurd.speedup(WIDE)).all()
    with pytest.raises(UsageError, match="gpus is 0"):
        ClusterAllReduce(compute_s=1, gradient_bytes=1, gpus=0, inside_gbytes_per_s=1, sustained_gbps=1)
    with pytest.raises(UsageError, match="above 0"):
        inside_gbytes_per_s(NVLINK, 0)


def test_links_inside_of_machines_have_these_shares_and_latencies() -> None:
    assert {name: (kind.name, kind.efficiency, kind.latency_s) for name, kind in INSIDE.items()} == {
        "nvlink": ("NVLink", 0.77, 1e-6),
        "infinity-fabric": ("Infinity Fabric", 0.77, 1e-6),
        "pcie": ("PCIe", 0.44, 3e-6),
    }
    assert inside_gbytes_per_s(INSIDE["infinity-fabric"], 896) == pytest.approx(344.96)
