"""What our model predicts of the paper's measurements, as ``deepvm reproduce`` lists it."""

from __future__ import annotations

import pytest

from deepvm.paper import Reproduction, reference


def test_our_model_predicts_table_iv_within_12_percent(made: Reproduction) -> None:
    rows = [c for c in made.comparisons if c.quantity == "makespan by our model"]
    assert [c.subject for c in rows] == [was.name for was in reference.TABLE_IV]
    for row, was in zip(rows, reference.TABLE_IV, strict=True):
        assert row.published == was.makespan_s
        assert row.relative is not None
        assert abs(row.relative) < 0.12
    assert float(rows[-1].ours) / float(rows[0].ours) == pytest.approx(2.14, abs=0.01)


def test_half_of_the_scaling_points_predict_the_others_within_10_percent(made: Reproduction) -> None:
    rows = [c for c in made.comparisons if c.quantity.startswith("mean error at")]
    assert [c.subject for c in rows] == [name for name in reference.SCALING_S for _ in range(2)]
    for row in rows:
        assert float(row.ours) < 0.10
