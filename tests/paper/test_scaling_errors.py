"""How far the paper's curves are from its own measurements."""

from __future__ import annotations

import pytest

from deepvm.paper.scaling import Scaling
from deepvm.performance import Logistic

CURVE = Logistic(a=0.5, b=3.0, c=2.0)
NODES, SECONDS = (1, 2, 4), (100.0, 60.0, 45.0)


def test_the_error_of_a_curve_is_that_of_its_worst_point() -> None:
    scaling = Scaling(instance="x", nodes=NODES, seconds=SECONDS, fits={}, published=CURVE)
    measured = [SECONDS[0] / seconds for seconds in SECONDS]

    def worst(speedups: list[float]) -> float:
        return max(abs(speedup / truth - 1) for speedup, truth in zip(speedups, measured, strict=True))

    assert scaling.claim_error == pytest.approx(worst([float(CURVE.speedup(nodes)) for nodes in NODES]))
    assert scaling.published_error == pytest.approx(worst([float(CURVE.published_speedup(nodes)) for nodes in NODES]))
