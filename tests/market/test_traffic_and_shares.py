"""Figures that stand in for prices that a market does not have: traffic by cloud, spot over on-demand."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from deepvm.catalog import Market as Side
from deepvm.catalog import load
from deepvm.catalog.clouds.traffic import between_zones_usd_per_gb, cloud_of_zone
from deepvm.market.market import Market, move_usd_per_gb
from deepvm.market.reference_prices import SPOT_SHARE


def test_the_assumed_spot_share_is_the_median_of_the_built_in_catalogue() -> None:
    usd: dict[Side, dict[tuple[str, str], float]] = {side: {} for side in Side}
    for offer in load("aws-2026-08").offers():
        if offer.instance.accelerator is not None:
            usd[offer.market].setdefault((offer.instance.name, offer.region), offer.usd_per_hour)
    shares = [spot / usd[Side.ON_DEMAND][key] for key, spot in usd[Side.SPOT].items()]
    assert statistics.median(shares) == pytest.approx(SPOT_SHARE, abs=0.01)


@pytest.mark.parametrize(
    ("cloud", "zone", "other"),
    [
        ("aws", "us-east-1a", "us-east-1b"),
        ("aws", "us-east-1/1", "us-east-1/2"),
        ("aws", "use1-az1", "use1-az2"),
        ("gcp", "us-central1-a", "us-central1-b"),
        ("gcp", "us-central1/1", "us-central1/3"),
        ("azure", "eastus2/1", "eastus2/2"),
        (None, "z/1", "z/2"),
    ],
)
def test_a_move_costs_what_the_cloud_of_its_zones_takes(cloud: str | None, zone: str, other: str) -> None:
    assert cloud_of_zone(zone) == cloud
    assert move_usd_per_gb(zone, other) == between_zones_usd_per_gb(cloud)
    assert move_usd_per_gb(zone, zone) == 0.0
    assert move_usd_per_gb(zone, "far-away") == 0.02
    up = np.ones((2, 1), np.int32)
    market = Market(zones=(zone, other), tick_s=60.0, capacity=up, price=up * 1.0, on_demand_usd=np.ones(2))
    assert market.move_usd_per_gb.tolist() == [[0.0, move_usd_per_gb(zone, other)], [move_usd_per_gb(other, zone), 0.0]]
