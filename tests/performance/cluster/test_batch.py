"""A limit of the global batch."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepvm.errors import UsageError
from deepvm.performance import AllReduce, LimitedBatch, curve_from_spec, limited_scaling

RING = AllReduce(compute_s=0.5, gradient_bytes=1e8, sustained_gbps=25)
NODES = np.arange(1, 257)


def limited(global_batch: int, **changes: float) -> LimitedBatch:
    return LimitedBatch(**{"curve": RING.to_spec(), "gpus": 1, "batch": 64, "global_batch": global_batch, **changes})


def test_within_the_limit_nothing_changes() -> None:
    assert np.array_equal(limited(64 * 256).scaling(NODES), RING.scaling(NODES))


def test_a_step_of_half_a_batch_adds_up_as_its_formula_says() -> None:
    n, fixed = 8, 0.1
    exchange_s = RING.compute_s / float(RING.scaling(n)) - RING.compute_s
    step_s = RING.compute_s * (fixed + (1 - fixed) / 2) + exchange_s
    assert float(limited(64 * 8 // 2).scaling(n)) == pytest.approx(0.5 * RING.compute_s / step_s)


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_a_larger_limit_is_never_slower(one: int, other: int) -> None:
    low, high = sorted((one, other))
    few, many = limited(low).scaling(NODES), limited(high).scaling(NODES)
    known = ~np.isnan(few)
    # The slowest GPU has one sample more than others, so a limit that divides evenly may beat the next few.
    assert (many[known] >= few[known] * (1 - 1 / np.ceil(low / NODES[known])) - 1e-12).all()
    assert (few[known] <= RING.scaling(NODES)[known] * (1 + 1e-12)).all()


def test_the_speedup_saturates_and_more_gpus_than_samples_are_impossible() -> None:
    speedup = limited(128).speedup(NODES)
    assert np.isnan(speedup[128:]).all()
    assert np.isfinite(speedup[:128]).all()
    assert int(np.nanargmax(speedup)) + 1 < 64  # without the limit, 128 machines beat 64
    assert RING.speedup(128) > RING.speedup(64)


def test_the_share_of_a_machine_that_exchanges_inside_does_not_shrink() -> None:
    whole = limited_scaling(1.0, gpus=8, batch=64, global_batch=256, compute_share=1.0)
    half = limited_scaling(1.0, gpus=8, batch=64, global_batch=256, compute_share=0.5)
    assert float(whole) == pytest.approx(0.5 / 0.55)
    assert float(half) == pytest.approx(0.5 / (1 - 0.45 * 0.5))


def test_the_curve_is_read_back_and_checks_itself() -> None:
    curve = limited(300)
    back = curve_from_spec(json.loads(json.dumps(curve.to_spec())))
    assert back == curve
    assert np.array_equal(back.scaling(NODES), curve.scaling(NODES), equal_nan=True)
    assert back.measured is None
    for changes, says in (
        ({"global_batch": 0}, "global_batch is 0"),
        ({"batch": 0.0}, "batch is 0"),
        ({"fixed_share": 1.5}, "at most 1"),
        ({"compute_share": 0.0}, "above 0"),
    ):
        with pytest.raises(UsageError, match=says):
            limited(**{"global_batch": 1, **changes})
    with pytest.raises(UsageError, match="a limit already"):
        LimitedBatch(curve=curve.to_spec(), gpus=1, batch=1, global_batch=1)
