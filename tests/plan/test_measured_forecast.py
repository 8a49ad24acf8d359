"""Profiles in a request: the forecast of a restore uses what was measured."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from deepvm.catalog import load
from deepvm.cli.plan import restore_text
from deepvm.performance.measured import Machine, Provenance, Samples
from deepvm.performance.profile import OverheadPoint, Profile
from deepvm.plan import Request, plan

MEASURED = Profile(
    workload="checkpoints",
    provenance=Provenance(machine=Machine(cpu="a cpu", cores=2), date="2026-11-18", versions={"deepvm": "0"}),
    overheads=tuple(
        OverheadPoint(name=name, state_bytes=300_000_000, seconds=Samples((seconds,)))
        for name, seconds in {"detection": 0.4, "regroup": 0.5, "start": 20.0, "first_step": 99.0}.items()
    ),
)


def test_a_forecast_uses_measured_stages_and_names_them() -> None:
    catalog, request = load("paper-aws-2023"), Request(budget_usd=3.0)
    plain = plan(catalog, request).recommendations[0]
    found = plan(catalog, replace(request, profiles=(MEASURED,))).recommendations[0]
    assert plain.restore is not None
    assert found.restore is not None
    before, after = plain.restore.time, found.restore.time
    assert (after.detection_s, after.rendezvous_s, after.entry_s, after.model_s) == (0.4, 0.5, 20.0, 0.0)
    assert after.first_step_s == before.first_step_s  # of another machine than the plan's
    assert after.total_s == pytest.approx(0.4 + 0.5 + 20.0 + before.fetch_s + before.first_step_s)
    assert plain.restore.measured == ()
    assert found.restore.measured == ("detection", "regroup", "start")
    assert "measured: detection, regroup, start" in restore_text(found.restore)
    assert "measured" not in restore_text(plain.restore)
    assert (found.roles, found.performance) == (plain.roles, plain.performance)


def test_a_plan_with_profiles_can_be_written() -> None:
    found = plan(load("paper-aws-2023"), Request(budget_usd=3.0, profiles=(MEASURED,)))
    document = json.loads(json.dumps(found.to_json()))
    assert document["request"]["profiles"][0]["workload"] == "checkpoints"
    assert document["recommendations"][0]["restore"]["measured"] == ["detection", "regroup", "start"]
