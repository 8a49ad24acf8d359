"""Each kind of unsoundness is found, and only that kind."""

import dataclasses
from datetime import date, timedelta

import numpy as np
import pytest

from deepvm.catalog import Catalog, Instance, Market, Prices, Quota
from deepvm.catalog.check import Severity, check
from deepvm.catalog.summary import summarize
from deepvm.errors import UnknownName

DAY = date(2026, 8, 22)
GPU = Instance(
    name="g4dn.xlarge", family="G", vcpus=4, memory_gib=16, accelerator="T4", accelerator_count=1,
    burst_gbps=25, sustained_gbps=5,
)  # fmt: skip
CPU = Instance(name="c5.xlarge", family="C", vcpus=4, memory_gib=8, burst_gbps=10, sustained_gbps=1.25)


def prices(*rows, low=None, high=None, seen=DAY):
    instance, place, usd = zip(*rows, strict=True) if rows else ((), (), ())
    return Prices(
        instance=np.array(instance, dtype=np.int32),
        place=np.array(place, dtype=np.int32),
        usd_per_hour=np.array(usd, dtype=np.float64),
        usd_low=None if low is None else np.array(low, dtype=np.float64),
        usd_high=None if high is None else np.array(high, dtype=np.float64),
        seen=np.full(len(rows), seen.toordinal(), dtype=np.int32),
    )


def catalog(instances=(GPU, CPU), on_demand=None, spot=None, quotas=()):
    return Catalog(
        name="test",
        provider="aws",
        description="",
        instances=tuple(instances),
        places=(("r1", None), ("r1", "r1a"), ("r1", "r1b"), ("r2", None)),
        prices={
            Market.ON_DEMAND: on_demand if on_demand is not None else prices((0, 0, 0.5), (1, 0, 0.2)),
            Market.SPOT: spot if spot is not None else prices((0, 1, 0.2), (1, 2, 0.1)),
        },
        quotas=quotas,
    )


def gpu(**changes):
    return catalog(instances=(dataclasses.replace(GPU, **changes), CPU))


def test_a_sound_catalogue_has_no_findings():
    assert check(catalog(), DAY) == []


@pytest.mark.parametrize(
    ("severity", "problem", "broken"),
    [
        ("error", "no prices at all", catalog(on_demand=prices(), spot=prices())),
        ("error", "listed twice", catalog(instances=(GPU, CPU, GPU), spot=prices((2, 0, 0.2)))),
        ("error", "sustained bandwidth above burst", gpu(sustained_gbps=30)),
        ("error", "interruption range", gpu(interruption_percent=(20, 10))),
        ("error", "interruption range", gpu(interruption_percent=(0, 120))),
        ("error", "two offers in the same place", catalog(spot=prices((0, 1, 0.2), (0, 1, 0.3)))),
        ("error", "outside its own range", catalog(spot=prices((0, 1, 0.2), low=[0.25]))),
        ("error", "outside its own range", catalog(spot=prices((0, 1, 0.2), high=[0.1]))),
        ("error", "in the future", catalog(spot=prices((0, 1, 0.2), seen=DAY + timedelta(days=3)))),
        ("error", "price not above zero", catalog(spot=prices((0, 1, np.nan)))),
        ("warning", "no price in any market", catalog(on_demand=prices((0, 0, 1)), spot=prices((0, 0, 0.2)))),
        ("warning", "accelerator unknown and no measured", gpu(accelerator="Abacus")),
        ("warning", "vCPUs unknown", gpu(vcpus=None)),
        ("warning", "memory unknown", catalog(instances=(GPU, dataclasses.replace(CPU, memory_gib=None)))),
        ("warning", "bandwidth unknown", gpu(sustained_gbps=None, burst_gbps=None)),
        ("warning", "older than 31 days", catalog(spot=prices((0, 1, 0.2), seen=DAY - timedelta(days=32)))),
        ("warning", "spot above on-demand", catalog(spot=prices((0, 1, 0.6)))),
        ("warning", "spot: bid floor", catalog(spot=prices((0, 1, 0.012)))),
        ("warning", "on-demand: bid floor", catalog(on_demand=prices((0, 0, 0.01), (1, 0, 0.2)))),
        ("warning", "exactly 10 %", catalog(spot=prices((0, 1, 0.05)))),
        ("warning", "exactly 10 %", catalog(on_demand=prices((1, 0, 0.17232)), spot=prices((1, 1, 0.0172)))),
        ("warning", "GPU memory disagrees", gpu(accelerator_memory_gib=0.078)),
        ("warning", "GPU memory disagrees", gpu(accelerator_count=8, accelerator_memory_gib=128)),
        ("note", "as expensive as on-demand", catalog(spot=prices((0, 1, 0.5)))),
        ("note", "fraction", gpu(accelerator_count=0.125)),
        ("note", "families without a type", catalog(quotas=(Quota(families=("P",), market=Market.SPOT, vcpus=1),))),
        (
            "warning",
            "region without offers",
            catalog(quotas=(Quota(families=("G",), market=Market.SPOT, vcpus=1, region="mars"),)),
        ),
        (
            "error",
            "two quotas",
            catalog(quotas=(Quota(families=("G",), market=Market.SPOT, vcpus=1),) * 2),
        ),
    ],
)
def test_each_problem_is_found(severity, problem, broken):
    found = [f for f in check(broken, DAY) if problem in f.problem]
    assert [f.severity for f in found] == [Severity(severity)]


def test_low_prices_and_sizes_of_the_market_are_no_findings():
    cheap = dataclasses.replace(GPU, accelerator="V100", accelerator_memory_gib=15.75)
    here = catalog(instances=(cheap, CPU), on_demand=prices((0, 0, 0.6), (1, 0, 0.2)), spot=prices((0, 1, 0.05)))
    assert check(here, DAY) == []
    slices = dataclasses.replace(GPU, accelerator="L4", accelerator_count=0.125, accelerator_memory_gib=2.79)
    found = check(catalog(instances=(slices, CPU)), DAY)
    assert [f.problem for f in found] == ["a fraction of an accelerator"]


def test_a_measured_accelerator_needs_no_table():
    assert check(gpu(accelerator="Abacus", eflops=3.0), DAY) == []


def test_thirty_one_days_are_not_yet_old():
    assert check(catalog(), DAY + timedelta(days=31)) == []


def test_a_range_that_is_unknown_contains_every_price():
    assert check(catalog(spot=prices((0, 1, 0.2), low=[np.nan], high=[np.nan])), DAY) == []


def test_a_price_of_the_zone_is_compared_before_that_of_the_region():
    here = catalog(on_demand=prices((0, 0, 0.1), (0, 1, 0.9), (1, 0, 0.9)), spot=prices((0, 1, 0.5)))
    assert not [f for f in check(here, DAY) if "spot above" in f.problem]


def test_many_findings_of_a_kind_are_one_with_examples():
    many = [dataclasses.replace(CPU, name=f"c{i}") for i in range(9)]
    (finding,) = [
        f
        for f in check(catalog(instances=many, on_demand=prices((0, 0, 1)), spot=prices((0, 0, 0.5))), DAY)
        if "no price" in f.problem
    ]
    assert (finding.subject, finding.count) == ("c1, c2, c3 and 5 more", 8)


def test_findings_come_gravest_first():
    broken = dataclasses.replace(
        catalog(instances=(dataclasses.replace(GPU, vcpus=None, accelerator_count=0.5, sustained_gbps=99), CPU))
    )
    assert [f.severity for f in check(broken, DAY)] == [Severity.ERROR, Severity.WARNING, Severity.NOTE]


def test_a_summary_shows_the_cheapest_place_of_each_market():
    here = catalog(on_demand=prices((0, 0, 0.5), (0, 3, 0.4)), spot=prices((0, 1, 0.3), (0, 2, 0.2), (1, 2, 0.1)))
    first, second = summarize(here)
    assert (first.instance, second.instance) == (GPU, CPU)
    assert (first.on_demand.offer.usd_per_hour, first.on_demand.offer.region, first.on_demand.places) == (0.4, "r2", 2)
    assert (first.spot.offer.usd_per_hour, first.spot.offer.zone, first.spot.offer.seen) == (0.2, "r1b", DAY)
    assert second.on_demand is None


def test_a_summary_can_be_of_one_type_or_one_gpu():
    assert [row.instance for row in summarize(catalog(), instance="c5.xlarge")] == [CPU]
    assert [row.instance for row in summarize(catalog(), gpu="nvidia tesla t4")] == [GPU]
    with pytest.raises(UnknownName, match="did you mean T4"):
        summarize(catalog(), gpu="T5")
    with pytest.raises(UnknownName, match=r"did you mean c5\.xlarge"):
        summarize(catalog(), instance="c5.xlarg")


@pytest.mark.parametrize(
    ("on_demand", "spot", "found"),
    [
        (0.526, 0.0526, True),
        (0.5263, 0.0526, True),  # rounded to four digits
        (0.526, 0.0528, False),
        (30.0, 3.00005, True),
        (30.0, 3.0002, False),
        (0.01, 0.001, True),
        (0.01, 0.00104, False),  # as near as rounding, but four percent off
    ],
)
def test_spot_at_a_tenth_of_on_demand_is_a_floor_but_for_rounding(on_demand: float, spot: float, found: bool) -> None:
    tested = catalog(on_demand=prices((0, 0, on_demand), (1, 0, 0.2)), spot=prices((0, 1, spot)))
    assert any("10 % of on-demand" in finding.problem for finding in check(tested, today=DAY)) == found
