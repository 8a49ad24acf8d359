"""Spot markets made by chance, as values and as folders of traces."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from deepvm.market.market import Market


def bulk_market(seed: int, *, zones: int = 1, days: float = 20, tick_s: float = 600, machines: int = 8) -> Market:
    """Machines that come and go in bulk, for short and for long spells, with prices that wander."""
    chance = np.random.default_rng(seed)
    ticks = int(days * 86400 / tick_s)
    capacity = np.zeros((zones, ticks), np.int32)
    for zone in range(zones):
        at, up = 0, bool(chance.integers(2))
        while at < ticks:
            mean_h = chance.choice([0.5, 9.0]) if up else chance.choice([0.4, 3.0])
            length = 1 + int(chance.exponential(mean_h * 3600 / tick_s))
            capacity[zone, at : at + length] = machines if up else int(chance.integers(machines))
            at, up = at + length, not up
    price = 1.0 + 0.5 * np.abs(np.cumsum(chance.normal(0, 0.02, (zones, ticks)), axis=1))
    return Market(
        zones=tuple(f"zone-{z}" for z in range(zones)),
        tick_s=tick_s,
        capacity=capacity,
        price=price,
        on_demand_usd=np.full(zones, 3.0),
    )


def write_traces(folder: Path, *, zones: int = 3, machines: int = 16, preempted: bool = False, seed: int = 0) -> Path:
    """Write one set in the public form: ``availability/N-node/SET/ZONE_ACCELERATOR_COUNT.json``."""
    market = bulk_market(seed, zones=zones, machines=machines, days=12)
    to = folder / "availability" / f"{machines}-node" / "some-set"
    to.mkdir(parents=True)
    for zone in range(zones):
        up = market.capacity[zone]
        document = {
            "metadata": {"gap_seconds": 600, "start_time": "2025-10-04T00:10:00+00:00"},
            "data": (machines - up if preempted else up).tolist(),
            "prices": market.price[zone].tolist(),
        }
        (to / f"us-east-1{'abcdef'[zone]}_v100_1.json").write_text(json.dumps(document))
    return folder
