"""What a run's ledger measured, as a profile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deepvm.events import Event
from deepvm.performance.measured import Machine, Provenance
from deepvm.performance.profile import Profile, profile_of, read_profile
from deepvm.runtime.ledger.measured import MOST_SAMPLES, measured_profile
from deepvm.runtime.ledger.report import make_report
from tests.runtime.ledger.test_report import CLUSTER, event, save, step, ups

HERE = Provenance(machine=Machine(cpu="a cpu", cores=2), date="2026-11-18T12:00:00", versions={"deepvm": "0"})

# A worker is lost after step 6; training continues from step 4.
LOSS = (
    event(0, "run-started", resumed=False),
    *ups(0),
    event(1, "group", round=1, world_size=2, machines=["worker/0", "worker/1"]),
    step(11, 1, 9.0),
    *(step(10 + n, n, 1.0 + n / 10) for n in range(2, 5)),
    save(14.5, 4, stall_s=0.25, seconds=0.5, bytes=100, rank=0),
    save(14.6, 4, stall_s=0.75, seconds=0.6, bytes=100, rank=1),
    save(15.2, 4, "durable", stall_s=0.25, seconds=1.2, bytes=100, rank=0),
    step(15, 5, 1.5),
    step(16, 6, 1.6),
    event(17, "machine-down", "worker/1", why="preempted", exit_code=-9),
    event(20, "group", round=2, world_size=2, machines=["worker/0", "worker/1"], took_s=3.0),
    event(22, "restored", "worker/0", step=4, place="memory://m:1", seconds=1.0, rank=0),
    event(22.5, "restored", "worker/1", step=4, place="memory://m:1", seconds=1.5, rank=1),
    step(24, 5, 1.5),
    step(25, 6, 1.0),
    event(26, "run-ended", outcome="finished"),
)


def measured(*events: Event) -> Profile | None:
    report = make_report(events, CLUSTER, run="one")
    return measured_profile(events, report, workload="digits", provenance=HERE)


def overheads(found: Profile | None) -> dict[str, tuple[float, ...]]:
    assert found is not None
    assert {point.state_bytes for point in found.overheads} <= {100}
    return {point.name: point.seconds.seconds for point in found.overheads}


def test_steps_saves_and_the_stages_of_a_recovery_are_in_the_profile() -> None:
    found = measured(*LOSS)
    assert overheads(found) == {
        "save_stall": (0.25,),
        "save_remote": (0.5,),
        "save_durable": (1.2,),
        "detection": (1.0,),
        "regroup": (3.0,),
        "start": (1.0,),
        "restore": (1.5,),
        "first_step": (1.5,),
    }
    assert found is not None
    (steps,) = found.scaling
    assert (steps.workers, steps.batch) == (2, None)
    assert steps.step_s.seconds == (1.2, 1.3, 1.4, 1.5, 1.6, 1.0)  # no first steps of a group
    assert found.workload == "digits"
    assert found.notes == ("measured by deepvm run one",)


def test_a_profile_of_a_run_is_written_and_read(tmp_path: Path) -> None:
    found = measured(*LOSS)
    assert found is not None
    found.write(tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == found
    assert profile_of(json.loads(json.dumps(found.to_json()))) == found


def test_a_run_that_measured_nothing_has_no_profile() -> None:
    assert measured() is None
    assert measured(event(0, "run-started", resumed=False), *ups(0), event(1, "run-ended", outcome="failed")) is None


def test_a_long_run_keeps_a_thousand_steps() -> None:
    found = measured(event(0, "run-started"), *(step(n, n, 1.0 + n % 7) for n in range(1, 5002)))
    assert found is not None
    assert 800 <= len(found.scaling[0].step_s.seconds) <= MOST_SAMPLES


def test_garbage_in_a_ledger_is_left_out() -> None:
    strange: list[dict[str, Any]] = [
        {"bytes": "many", "seconds": 1.0},
        {"bytes": 10, "seconds": -1.0},
        {"bytes": 0, "seconds": 1.0},
        {"bytes": True, "seconds": 1.0},
        {"seconds": 1.0},
    ]
    events = [save(n, n, "remote", **data) for n, data in enumerate(strange)]
    assert overheads(measured(*LOSS, *events)) == overheads(measured(*LOSS))
    assert measured(event(0, "step", None, step=1, seconds=float("nan")), step(1, 2, -5.0)) is None
