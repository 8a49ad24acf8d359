from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepvm.errors import UsageError
from deepvm.performance import estimate_eflops

positive = st.floats(1e-3, 1e6)


def test_a_t4_is_what_was_measured() -> None:
    assert estimate_eflops(tflops_16bit=65, memory_gbytes_per_s=320) == pytest.approx(377, rel=1e-12)


@pytest.mark.parametrize(("tflops", "gbytes", "measured_eflops"), [(4.83, 160, 100), (65, 320, 377), (70, 600, 696)])
def test_estimate_is_within_30_percent_of_every_measured_gpu(
    tflops: float, gbytes: float, measured_eflops: float
) -> None:
    estimate = estimate_eflops(tflops_16bit=tflops, memory_gbytes_per_s=gbytes)
    assert estimate == pytest.approx(measured_eflops, rel=0.30)


def test_estimate_errs_by_what_its_docstring_says() -> None:
    assert estimate_eflops(tflops_16bit=4.83, memory_gbytes_per_s=160) == pytest.approx(73, abs=0.5)
    assert estimate_eflops(tflops_16bit=70, memory_gbytes_per_s=600) == pytest.approx(536, abs=0.5)


@given(tflops=positive, gbytes=positive, count=st.floats(0.05, 64))
def test_eflops_add_up_over_accelerators_and_grow_with_both_rates(tflops: float, gbytes: float, count: float) -> None:
    one = estimate_eflops(tflops_16bit=tflops, memory_gbytes_per_s=gbytes)
    many = estimate_eflops(tflops_16bit=tflops, memory_gbytes_per_s=gbytes, count=count)
    assert many == pytest.approx(one * count)
    assert estimate_eflops(tflops_16bit=4 * tflops, memory_gbytes_per_s=gbytes) == pytest.approx(2 * one)
    assert estimate_eflops(tflops_16bit=tflops, memory_gbytes_per_s=4 * gbytes) == pytest.approx(2 * one)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("which", ["tflops_16bit", "memory_gbytes_per_s", "count"])
def test_a_rate_that_cannot_be_is_refused_by_name(which: str, bad: float) -> None:
    with pytest.raises(UsageError, match=which):
        estimate_eflops(**{"tflops_16bit": 65.0, "memory_gbytes_per_s": 320.0, which: bad})
