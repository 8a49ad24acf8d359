"""What an instance type may be."""

from __future__ import annotations

import math
from typing import Any

import pytest

from deepvm.catalog.model import Instance
from deepvm.errors import UsageError


def instance(**changed: Any) -> Instance:
    return Instance(**{"name": "g4dn.xlarge", "accelerator": "T4", "accelerator_count": 1.0, **changed})


@pytest.mark.parametrize(
    "what", ["vcpus", "memory_gib", "accelerator_memory_gib", "burst_gbps", "sustained_gbps", "eflops"]
)
@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan])
def test_a_figure_is_above_zero_or_absent(what: str, value: float) -> None:
    with pytest.raises(UsageError, match=what):
        instance(**{what: value})
    assert getattr(instance(**{what: 0.5}), what) == 0.5


@pytest.mark.parametrize(
    "wrong",
    [
        {"accelerator": None, "accelerator_count": 1.0},
        {"accelerator": "T4", "accelerator_count": 0.0},
        {"accelerator": "T4", "accelerator_count": -1.0},
        {"accelerator": "T4", "accelerator_count": math.inf},
        {"architecture": "sparc"},
        {"name": ""},
    ],
)
def test_contradictions_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        instance(**wrong)


def test_the_sustained_bandwidth_is_planned_with_where_it_is_known() -> None:
    assert instance(burst_gbps=10.0, sustained_gbps=5.0).gbps == 5.0
    assert instance(burst_gbps=10.0, sustained_gbps=None).gbps == 10.0
