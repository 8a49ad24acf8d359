"""The all-reduce, fitted to half of the measured points, predicts the other half."""

from __future__ import annotations

import random

import numpy as np
import pytest

from deepvm.performance import fit
from tests.support.measured_scaling import MEASURED, NODES

HALVES = [NODES[::2], (1, *NODES[1::2])]


def mean_error(name: str, half: tuple[int, ...]) -> float:
    run = MEASURED[name]
    seconds = dict(zip(run.nodes, run.seconds, strict=True))
    curve = fit(
        "all-reduce",
        half,
        [seconds[n] for n in half],
        gradient_bytes=run.gradient_bytes,
        sustained_gbps=run.gbps,
        steps=run.steps,
    ).curve
    held = [n for n in NODES if n not in half]
    predicted = run.seconds[0] / curve.speedup(held)
    return float(np.abs(predicted / [seconds[n] for n in held] - 1).mean())


@pytest.mark.parametrize("name", MEASURED)
@pytest.mark.parametrize("half", HALVES, ids=["even", "odd"])
def test_every_other_point_predicts_the_rest_within_10_percent(name: str, half: tuple[int, ...]) -> None:
    assert mean_error(name, half) < 0.10


@pytest.mark.parametrize("name", MEASURED)
def test_random_halves_predict_the_rest_within_10_percent(name: str) -> None:
    draw = random.Random(18)
    halves = [(1, *sorted(draw.sample(NODES[1:], 4))) for _ in range(5)]
    errors = [mean_error(name, half) for half in halves]
    assert np.mean(errors) < 0.08
    assert np.median(errors) < 0.08
