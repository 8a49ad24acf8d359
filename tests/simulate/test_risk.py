"""The risk of one strategy on one market: distributions over starts, and the history they rest on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from deepvm.errors import UsageError
from deepvm.policy.placement import CheapestUp
from deepvm.simulate import FixedInterval, GangJob, SafetyNet, Strategy, replay, risk_of, risks_of
from tests.support.simulate.markets import bulk_market

JOB = GangJob(work_h=12.0, machines=8, checkpoint_bytes=6 * 10**9, deadline_h=18.0)
MOVING = Strategy(
    name="moving", saves=FixedInterval(interval_h=0.1, stall_h=0.001), placement=CheapestUp(), fallback=SafetyNet()
)


def test_risk_is_the_distribution_over_starts_of_a_market_that_repeats() -> None:
    market = bulk_market(1, zones=3)
    risk = risk_of(market, JOB, MOVING, starts=40)
    document = risk.to_json()
    assert set(document) == {"cost_usd", "hours", "missed", "lost_hours", "moves", "history"}
    assert document["cost_usd"]["p5"] <= document["cost_usd"]["p50"] <= document["cost_usd"]["p95"]
    assert document["history"]["enough"] is True
    starts = np.linspace(0.0, market.hours, 40, endpoint=False)
    early = starts < market.hours - 30
    alone = replay(market, JOB, MOVING, starts[early])
    assert risk.outcomes.cost_usd[early] == pytest.approx(alone.cost_usd, abs=1e-9)
    assert risk.outcomes.finished.all()


def test_strategies_that_share_tables_are_replayed_as_if_alone() -> None:
    market = bulk_market(2, zones=3)
    others = [MOVING, replace(MOVING, saves=FixedInterval(interval_h=0.5)), replace(MOVING, least=4)]
    for together, strategy in zip(risks_of(market, JOB, others, starts=30), others, strict=True):
        alone = risk_of(market, JOB, strategy, starts=30)
        assert together.outcomes.cost_usd.tolist() == alone.outcomes.cost_usd.tolist()


def test_runs_without_a_deadline_are_followed_to_their_end() -> None:
    market = bulk_market(3, zones=1)
    job = replace(JOB, deadline_h=None)
    assert risk_of(market, job, replace(MOVING, fallback=None), starts=40).missed == 0.0


def test_a_far_deadline_is_followed_no_longer_than_the_work_can_use() -> None:
    market = bulk_market(3, zones=1)
    far, farther = (risk_of(market, replace(JOB, deadline_h=due_h), MOVING, starts=40) for due_h in (1e5, 1e300))
    assert far.missed == 0.0
    assert far.to_json() == farther.to_json()


def test_no_starts_are_refused() -> None:
    with pytest.raises(UsageError, match="starts is 0"):
        risk_of(bulk_market(0), JOB, MOVING, starts=0)
