"""Prices of files by tick, their age and whose they are; rates of profiles; machines of plans."""

from __future__ import annotations

from datetime import date, datetime, timezone
from typing import Any

import numpy as np
import pytest

from deepvm.market import PriceHistory, Trace, TraceKind
from deepvm.performance.measured import Machine, Provenance, Samples
from deepvm.performance.profile import OverheadPoint, Profile
from deepvm.simulate import Rates
from deepvm.simulate.inputs.dated_prices import ZonePrices, zone_prices
from deepvm.simulate.inputs.measured_rates import measured_rates

DAY = date(2025, 10, 1).toordinal()
ROWS = [
    ("aws", "p3.2xlarge", "use1-az1", "spot", DAY, 0.9),
    ("aws", "p3.2xlarge", "use1-az2", "spot", DAY + 2, 1.3),
    ("aws", "p3.2xlarge", "use1-az2", "spot", DAY + 4, float("nan")),
    ("aws", "p3.2xlarge", "us-west-2a", "spot", DAY, 0.4),
    ("aws", "p3.2xlarge", "us-east-1", "on-demand", DAY, 3.0),
    ("aws", "p3.2xlarge", "us-east-1", "on-demand", DAY + 3, 3.1),
]


def trace(**fields: Any) -> Trace:
    """Half days."""
    usual = {"zone": "us-east-1c", "machines": 4, "gap_s": 43_200.0, "kind": TraceKind.LAUNCH, "accelerator": "V100"}
    start = datetime(2025, 10, 2, 12, tzinfo=timezone.utc)
    return Trace(**{**usual, "up": np.full(5, 4, np.int32), "start": start, **fields})


def prices(seen: range = range(DAY, DAY + 7), title: str = "set", **fields: Any) -> ZonePrices:
    found = zone_prices(PriceHistory.of(ROWS, seen=seen), trace(**fields), title)
    assert found is not None
    return found


def test_a_region_has_the_median_of_its_zones_by_day() -> None:
    found = prices()
    assert found.spot.tolist() == pytest.approx([1.1] * 5)  # before its first price, az2 has that one
    assert (found.on_demand_usd, found.age_days) == (3.0, 0)
    assert found.note == "prices of p3.2xlarge in us-east-1, the median of its 2 zones, at most 0 days old"
    own = prices(zone="us-west-2a")
    assert (own.spot.tolist(), own.on_demand_usd, own.where) == ([0.4] * 5, None, "p3.2xlarge in us-west-2a")
    later = prices(start=datetime(2025, 10, 4, tzinfo=timezone.utc))
    assert later.on_demand_usd == 3.1


def test_days_with_an_empty_price_have_the_last_one_and_are_counted() -> None:
    found = prices(start=datetime(2025, 10, 4, tzinfo=timezone.utc), up=np.full(6, 4, np.int32))
    assert found.spot.tolist() == pytest.approx([1.1] * 6)
    assert found.bridged_days == 2, "az2 has none from 5 October on"
    assert found.note.endswith("at most 0 days old; on 2 days without a price, the last one counts")
    assert prices(start=datetime(2025, 10, 4, tzinfo=timezone.utc), up=np.full(4, 4, np.int32)).note.count("1 day ")


@pytest.mark.parametrize(
    ("seen", "age_days"),
    [
        (range(DAY, DAY + 2), 2),
        (range(DAY, DAY + 9, 2), 1),
        (range(DAY + 2, DAY + 9), -1),
        (range(DAY + 1, DAY + 4), 0),
    ],
)
def test_the_age_of_prices_counts_from_when_they_were_looked_up(seen: range, age_days: int) -> None:
    assert prices(seen).age_days == age_days


def test_a_set_of_a_day_begins_then_and_its_later_part_later() -> None:
    assert prices(start=None, title="aws-10-02-2025").age_days == 0
    late = prices(start=None, title="aws-09-30-2025", first_s=3 * 86_400.0)
    assert late.on_demand_usd == 3.0
    assert late.age_days == 0
    assert prices(start=None, title="aws-09-30-2025").age_days == -1
    for title in ("aws-13-02-2025", "aws-1-2-2025", "100-02-2025"):
        assert zone_prices(PriceHistory.of(ROWS), trace(start=None), title) is None


def test_types_without_a_price_have_none() -> None:
    history = PriceHistory.of([("aws", "p3.2xlarge", "use1-az1", "spot", DAY, float("nan"))])
    assert zone_prices(history, trace(), "set") is None
    assert zone_prices(PriceHistory.of(ROWS), trace(accelerator="B200"), "set") is None


def rates_of(**seconds: float) -> Rates:
    points = [OverheadPoint(name=name, state_bytes=10**9, seconds=Samples((s,))) for name, s in seconds.items()]
    where = Provenance(machine=Machine(cpu="x", cores=1), date="2026-11-18")
    return measured_rates([Profile(workload="x", provenance=where, overheads=tuple(points))], 10**9)


def test_measured_overheads_replace_their_rates_alone() -> None:
    usual = Rates()
    assert rates_of() == usual
    assert rates_of(save_stall=0.2).stall_s == 0.2
    document = [
        rates_of(start=5.0).start_s, rates_of(first_step=3.0).start_s, rates_of(start=5.0, first_step=3.0).start_s,
        rates_of(detection=1.0).regroup_s, rates_of(regroup=4.0).regroup_s,
        rates_of(save_durable=4.0).durable_bytes_per_s, rates_of(restore=2.0).restore_bytes_per_s,
        rates_of(save_remote=8.0).memory_bytes_per_s,
    ]  # fmt: skip
    assert document == pytest.approx([95.0, 94.5, 98.0, 2.0, 4.1, 2.5e8, 5e8, 1.25e8])
