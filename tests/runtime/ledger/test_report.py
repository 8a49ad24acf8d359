"""The report: what happened is counted once, nothing is paid twice, and a story that breaks off is still told."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deepvm.events import KINDS, Event, is_time
from deepvm.runtime.cluster import Cluster, Machine
from deepvm.runtime.ledger.ledger import Ledger
from deepvm.runtime.ledger.report import Report, make_report
from deepvm.runtime.ledger.steps import LARGEST


def machine(name: str, usd: float = 0.36, on_demand: float | None = 0.72) -> Machine:
    role: Any = name.partition("/")[0]
    market: Any = "spot" if role == "worker" else "on-demand"
    return Machine(
        name=name, role=role, instance="g", market=market, usd_per_hour=usd, on_demand_usd_per_hour=on_demand
    )


CLUSTER = Cluster(
    machines=(machine("worker/0"), machine("worker/1"), machine("memory/0", 0.18, 0.18)),
    architecture="tiering", catalog="a", checkpoint_bytes=1, restore_s=5.0, notes=("scaled",),
)  # fmt: skip
NAMES = tuple(m.name for m in CLUSTER.machines)


def event(at_s: float, kind: str, name: str | None = None, /, **data: Any) -> Event:
    return Event(at_s=at_s, kind=kind, machine=name, data=data)


def step(at_s: float, number: int, seconds: float = 1.0, world_size: int = 2) -> Event:
    return event(at_s, "step", "worker/0", step=number, seconds=seconds, world_size=world_size)


def save(at_s: float, number: int | None, state: str = "remote", **data: Any) -> Event:
    return event(at_s, "save", "worker/0", step=number, state=state, **data)


def report(*events: Event, now_s: float | None = None) -> Report:
    return make_report(events, CLUSTER, now_s, run="one")


def ups(at_s: float, names: Iterable[str] = NAMES) -> list[Event]:
    return [event(at_s, "machine-up", name) for name in names]


def downs(at_s: float, why: str = "ended", names: Iterable[str] = NAMES) -> list[Event]:
    return [event(at_s, "machine-down", name, why=why) for name in names]


# One preemption: steps 1 to 6, of which 4 are saved; 5 and 6 come again.
STORY = (
    event(0, "run-started", resumed=False),
    *ups(0),
    event(1, "group", round=1, world_size=2, machines=["worker/0", "worker/1"]),
    *(step(10 + n, n) for n in range(1, 5)),
    save(14.5, 4, stall_s=0.25, place="memory://m:1", seconds=0.5, bytes=100),
    step(15, 5),
    save(15.2, 4, "durable", stall_s=0.25, place="file:///c"),
    step(16, 6),
    event(16.1, "notice", "worker/1", seconds_left=120.0, source="file", action="terminate"),
    event(16.2, "decision", "worker/1", choice="rely", why="too little time"),
    save(16.3, 6, "skipped", stall_s=0.5, why="no room"),
    event(17, "machine-down", "worker/1", why="preempted", exit_code=-9),
    event(18, "replanned", changes=["worker/1: h instead of g"]),
    event(19, "machine-up", "worker/1", usd_per_hour=0.72, on_demand_usd_per_hour=1.44, instance="h"),
    event(20, "group", round=2, world_size=2, machines=["worker/0", "worker/1"], took_s=3.0),
    event(22, "restored", "worker/0", step=4, place="memory://m:1", fetched=True, seconds=1.0),
    event(22.5, "restored", "worker/1", step=4, place="memory://m:1", seconds=1.5),
    *(step(24 + n, 5 + n) for n in range(4)),
    event(29, "run-ended", outcome="finished"),
    *downs(30),
)


def test_the_whole_story_as_json() -> None:
    told = make_report(STORY, CLUSTER, run="one").to_json()
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert told == {
        "format": "deepvm-report/1",
        "run": "one",
        "outcome": "finished",
        "why": None,
        "sessions": 1,
        "started_s": 0,
        "wall_s": 30,
        "steps": {"done": 8, "lost": 2, "repeated": 2, "repeated_s": 2.0},
        "stalled_s": 0.75,
        "stood_still_s": 8.0,
        "goodput": pytest.approx(16 / 88),
        "useful_machine_s": 16.0,
        "checkpoints": {
            "made": 1,
            "durable": 1,
            "skipped": 1,
            "failed": 0,
            "newest": {"step": 4, "at_s": 14.5, "durable": True, "places": ["memory://m:1", "file:///c"]},
            "last_problem": "no room",
        },
        "notices": [
            {
                "at_s": 16.1, "machine": "worker/1", "action": "terminate", "seconds_left": 120.0, "source": "file",
                "choice": "rely", "why": "too little time",
            }
        ],
        "losses": [{"at_s": 17, "machine": "worker/1", "role": "worker", "why": "preempted"}],
        "pauses": [
            {
                "at_s": 16, "seconds": 8.0, "recovered": True, "machines": ["worker/1"],
                "parts": {"detect_s": 1, "regroup_s": 3, "start_s": 1.0, "restore_s": 1.5, "first_step_s": 1.5},
            }
        ],
        "restores": [
            {"at_s": 22.5, "step": 4, "place": "memory://m:1", "fetched": True, "seconds": 1.5, "trainers": 2}
        ],
        "bill": {
            "roles": [
                {
                    "role": "worker", "machines": 2, "hires": 3, "machine_s": 58.0,
                    "usd": pytest.approx((30 + 17) * 0.0001 + 11 * 0.0002),
                    "on_demand_usd": pytest.approx((30 + 17) * 0.0002 + 11 * 0.0004), "fallback_s": 0.0,
                    "fallback_usd": 0.0,
                },
                {
                    "role": "memory", "machines": 1, "hires": 1, "machine_s": 30.0, "usd": pytest.approx(0.0015),
                    "on_demand_usd": pytest.approx(0.0015), "fallback_s": 0.0, "fallback_usd": 0.0,
                },
            ],
            "machine_s": 88.0,
            "usd": pytest.approx(0.0084),
            "on_demand_usd": pytest.approx(0.0153),
            "saved_usd": pytest.approx(0.0069),
        },
        "forecast": {
            "usd_per_hour": {"planned": pytest.approx(0.9), "happened": pytest.approx(0.0084 * 120)},
            "pause_s": {"planned": 5.0, "median": 8.0},
            "restore_s": {"median": 1.5},
        },
        "changes": ["worker/1: h instead of g"],
        "notes": ["scaled"],
        "warnings": [],
        "profile": None,
        "conduct": None,
    }  # fmt: skip


def test_a_ledger_gives_the_same_report_as_its_events(tmp_path: Path) -> None:
    with Ledger.create(tmp_path / "ledger.sqlite", run="one", cluster=CLUSTER) as ledger:
        ledger.append(STORY)
        assert make_report(ledger.events(), ledger.cluster, run=ledger.run) == make_report(STORY, CLUSTER, run="one")


class TestARunThatBreaksOff:
    def test_nothing_at_all(self) -> None:
        empty = report()
        assert (empty.outcome, empty.sessions, empty.wall_s, empty.steps_done) == ("broken-off", 0, 0.0, 0)
        assert (empty.goodput, empty.bill.usd, empty.forecast.usd_per_hour) == (None, 0.0, None)
        json.dumps(empty.to_json(), allow_nan=False)

    def test_machines_without_an_end_are_paid_until_the_last_event(self) -> None:
        told = report(event(0, "run-started"), *ups(10), step(20, 1))
        assert (told.outcome, told.wall_s, told.bill.machine_s) == ("broken-off", 20, 30)

    def test_machines_of_a_run_that_continues_are_paid_until_now(self) -> None:
        told = report(event(0, "run-started"), *ups(10), step(20, 1), now_s=40)
        assert (told.outcome, told.wall_s, told.bill.machine_s) == ("running", 40, 90)

    def test_a_clock_that_is_behind_the_events_changes_nothing(self) -> None:
        assert report(event(0, "run-started"), *ups(10), step(20, 1), now_s=5).bill.machine_s == 30

    def test_an_ended_run_is_not_paid_until_now(self) -> None:
        told = report(event(0, "run-started"), *ups(10), event(20, "run-ended", outcome="failed", why="x"), now_s=900)
        assert (told.outcome, told.why, told.wall_s, told.bill.machine_s) == ("failed", "x", 20, 30)

    def test_the_time_between_two_sessions_is_neither_paid_nor_counted(self) -> None:
        told = report(
            event(0, "run-started"), *ups(0), step(10, 1),
            event(1000, "run-started", resumed=True), *ups(1000), step(1020, 2), *downs(1030),
        )  # fmt: skip
        assert (told.sessions, told.wall_s, told.bill.machine_s) == (2, 40, 120)

    def test_a_machine_that_outlived_its_session_is_paid_until_its_end_is_reported(self) -> None:
        told = report(
            event(0, "run-started"), *ups(0, ["worker/0"]), step(10, 1),
            event(1000, "run-started", resumed=True), *downs(1001, "stopped", ["worker/0"]),
        )  # fmt: skip
        assert told.bill.machine_s == 1001

    def test_an_end_without_a_beginning_costs_nothing(self) -> None:
        assert report(*downs(10)).bill.machine_s == 0

    def test_events_before_any_start_are_counted_once(self) -> None:
        assert report(*ups(0, ["worker/0"]), *downs(5)).bill.roles[0].hires == 1


class TestSteps:
    def test_only_what_no_checkpoint_has_is_lost(self) -> None:
        told = report(*(step(n, n) for n in range(1, 8)), save(5.5, 5), *downs(8, "lost", ["worker/0"]))
        assert (told.steps_lost, told.steps_repeated) == (2, 0)

    def test_two_machines_lost_at_once_lose_the_steps_once(self) -> None:
        told = report(*(step(n, n) for n in range(1, 8)), *downs(8, "lost", ["worker/0", "worker/1"]))
        assert told.steps_lost == 7

    def test_the_loss_of_a_memory_node_loses_no_steps_and_stops_nobody(self) -> None:
        told = report(*(step(n, n) for n in range(1, 8)), *downs(8, "lost", ["memory/0"]), step(9, 8), step(10, 9))
        assert (told.steps_lost, len(told.losses), told.pauses) == (0, 1, ())

    def test_an_end_that_was_wanted_is_no_loss(self) -> None:
        told = report(*(step(n, n) for n in range(1, 8)), *downs(8, "left", ["worker/0"]))
        assert (told.steps_lost, told.losses, told.pauses) == (0, (), ())

    def test_what_a_worker_lost_that_failed_by_itself_shows_in_its_restore(self) -> None:
        told = report(*(step(n, n) for n in range(1, 8)), save(5.5, 5), event(9, "restored", "worker/0", step=5))
        assert told.steps_lost == 2

    def test_a_checkpoint_that_could_not_be_used_loses_its_steps_too(self) -> None:
        told = report(*(step(n, n) for n in range(1, 8)), save(5.5, 5), event(9, "restored", "worker/0", step=3))
        assert told.steps_lost == 4

    def test_losing_again_before_anything_was_saved_loses_again(self) -> None:
        told = report(
            step(1, 1), *downs(2, "lost", ["worker/0"]), event(3, "restored", "worker/0", step=0),
            step(4, 1), step(5, 2), *downs(6, "lost", ["worker/0"]),
        )  # fmt: skip
        assert (told.steps_lost, told.steps_repeated, told.steps_done) == (3, 1, 2)

    def test_steps_that_arrive_late_are_counted_when_they_happened(self) -> None:
        told = report(step(1, 1), step(2, 2), save(1.5, 1), *downs(3, "lost", ["worker/1"]), step(2.9, 3))
        assert told.steps_lost == 2

    def test_the_last_execution_of_a_step_is_the_useful_one(self) -> None:
        told = report(*ups(0, ["worker/0"]), step(1, 1, 0.25, 2), step(2, 1, 0.5, 1), *downs(10))
        assert (told.useful_machine_s, told.repeated_s, told.goodput) == (0.5, 0.25, 0.05)

    def test_a_machine_with_several_ranks_is_one_machine(self) -> None:
        told = report(
            *ups(0, ["worker/0", "worker/1"]), step(1, 1, 1.0, 8), event(2, "group", machines=["worker/0", "worker/1"]),
            step(3, 2, 1.0, 8), step(4, 3, 1.0, 1), event(5, "group", machines=["worker/0"]), step(6, 4, 1.0, 4),
        )  # fmt: skip
        assert told.useful_machine_s == 8 + 2 + 1 + 1


class TestPauses:
    def test_losses_before_training_continues_are_one_pause(self) -> None:
        told = report(
            *(step(n, n) for n in range(1, 4)), *downs(4, "lost", ["worker/0"]), *downs(5, "lost", ["worker/1"]),
            event(8, "group", machines=["worker/0", "worker/1"]), event(9, "restored", "worker/0", step=3, seconds=1.0),
            step(10, 4), *downs(12, "lost", ["worker/1"]), event(14, "group"), step(15, 5),
        )  # fmt: skip
        assert [(p.at_s, p.seconds, p.machines) for p in told.pauses] == [
            (3, 7.0, ("worker/0", "worker/1")),
            (10, 5.0, ("worker/1",)),
        ]
        assert told.stood_still_s == 12
        assert all(math.fsum(p.parts.values()) == p.seconds for p in told.pauses)

    def test_a_step_that_was_under_way_does_not_end_the_pause(self) -> None:
        told = report(step(1, 1), *downs(2, "lost", ["worker/1"]), step(2.02, 2), event(5, "group"), step(7, 2))
        assert [(p.at_s, p.seconds) for p in told.pauses] == [(2.02, pytest.approx(4.98))]

    def test_training_that_continues_without_a_new_group_stood_still_until_its_next_step(self) -> None:
        told = report(step(1, 1), *downs(2, "lost", ["worker/1"]), step(3, 2), step(4, 3), event(50, "run-ended"))
        assert [p.seconds for p in told.pauses] == [2]

    def test_the_pause_of_a_machine_that_hung_begins_with_the_last_step_and_not_with_the_news(self) -> None:
        told = report(
            *(step(n, n) for n in range(1, 11)), *downs(35, "lost", ["worker/1"]),
            event(40, "group", machines=["worker/0", "worker/1"], took_s=15.0),
            event(50, "restored", "worker/0", step=9, seconds=1.0), step(54, 10),
        )  # fmt: skip
        (pause,) = told.pauses
        assert (pause.at_s, pause.seconds) == (10, 44)
        assert pause.parts == {
            "detect_s": 25, "regroup_s": 5, "start_s": 9.0, "restore_s": 1.0, "first_step_s": 4.0
        }  # fmt: skip

    def test_a_pause_does_not_begin_in_an_earlier_session(self) -> None:
        told = report(
            event(0, "run-started"), step(1, 1), event(2, "run-ended"), event(100, "run-started"),
            event(101, "group", machines=["worker/1"]), *downs(103, "lost", ["worker/1"]), event(104, "group"),
            step(110, 2),
        )  # fmt: skip
        assert [(p.at_s, p.seconds) for p in told.pauses] == [(103, 7)]

    def test_a_pause_that_nothing_ended_lasts_until_its_session_does(self) -> None:
        told = report(
            event(0, "run-started"), step(1, 1), *downs(2, "lost", ["worker/1"]), event(8, "run-ended"),
            event(500, "run-started"), event(501, "group"), step(502, 2),
        )  # fmt: skip
        assert [(p.seconds, p.recovered, p.parts) for p in told.pauses] == [(7, False, {"detect_s": 1})]
        assert told.forecast.median_pause_s is None

    def test_a_machine_that_left_its_group_before_the_end_stops_training_once(self) -> None:
        told = report(
            step(1, 1), event(5, "group", machines=["worker/0"], took_s=3.0), step(6, 2), step(7, 3),
            *downs(7.5, "preempted", ["worker/1"]), step(8, 4), step(9, 5),
        )  # fmt: skip
        assert [(p.at_s, p.seconds, p.machines) for p in told.pauses] == [(1, 5, ())]

    def test_a_first_group_is_no_pause(self) -> None:
        told = report(
            event(0, "run-started"), event(3, "group", took_s=3.0), step(4, 1),
            event(9, "run-started"), event(12, "group", took_s=3.0), step(13, 2),
        )  # fmt: skip
        assert told.pauses == ()

    def test_ranks_of_one_machine_that_restore_at_once_are_one_restore(self) -> None:
        ranks = [event(2 + n / 8, "restored", "worker/0", step=1, seconds=n / 8, rank=n) for n in range(4)]
        again = [event(7 + n / 8, "restored", "worker/0", step=1, seconds=n / 8, rank=n) for n in range(4)]
        told = report(*ranks, step(5, 2), *again).restores
        assert [(r.at_s, r.seconds, len(r.trainers)) for r in told] == [(2.375, 0.375, 4), (7.375, 0.375, 4)]


class TestSaves:
    def test_a_stall_that_is_reported_twice_counts_once(self) -> None:
        told = report(save(1, 5, stall_s=0.5), save(2, 5, "durable", stall_s=0.5), save(3, 6, "failed", stall_s=1.0))
        assert told.stalled_s == 1.5

    def test_a_save_of_which_every_rank_tells_is_one_and_the_slowest_stall_counts(self) -> None:
        told = report(
            save(1, 5, stall_s=0.5, rank=0), save(1.1, 5, "durable", stall_s=0.5, rank=0),
            save(1.2, 5, stall_s=0.75, rank=1),
            save(9, 5, stall_s=1.0, rank=1), save(9.1, 5, stall_s=1.0, rank=0),
        )  # fmt: skip
        assert (told.checkpoints.made, told.checkpoints.durable, told.stalled_s) == (2, 1, 1.75)

    def test_what_is_durable_at_once_was_made(self) -> None:
        told = report(save(1, 5, "durable"), save(2, 6, "durable")).checkpoints
        assert (told.made, told.durable) == (2, 2)

    def test_a_step_that_is_saved_again_was_made_again(self) -> None:
        told = report(save(1, 5), save(2, 5), save(3, 4, place="x")).checkpoints
        assert (told.made, told.newest and told.newest.step) == (3, 5)


class TestNotices:
    def test_a_decision_belongs_to_its_machine(self) -> None:
        told = report(
            event(1, "notice", "worker/0", action="rebalance"), event(2, "notice", "worker/1", action="terminate"),
            event(3, "decision", "worker/0", choice="save"), event(4, "decision", "worker/2", choice="rely"),
        ).notices  # fmt: skip
        assert [(n.machine, n.action, n.choice) for n in told] == [
            ("worker/0", "rebalance", "save"),
            ("worker/1", "terminate", None),
            ("worker/2", None, "rely"),
        ]


class TestMoney:
    def test_a_price_that_nobody_knows_is_not_zero(self) -> None:
        told = report(*ups(0), event(0, "machine-up", "worker/9"), *downs(10), *downs(10, names=["worker/9"])).bill
        assert told.machine_s == 40
        assert (told.usd, told.on_demand_usd, told.saved_usd) == (None, None, None)
        assert [role.usd is None for role in told.roles] == [True, False]

    def test_the_price_is_that_of_when_the_machine_came(self) -> None:
        asked = event(0, "machine-asked", "worker/0", usd_per_hour=3.6, on_demand_usd_per_hour=7.2, role="anchor")
        told = report(asked, *ups(1, ["worker/0"]), *downs(11), *ups(20, ["worker/0"]), *downs(30)).bill
        assert [(role.role, role.usd) for role in told.roles] == [
            ("worker", pytest.approx(0.001)),
            ("anchor", pytest.approx(0.01)),
        ]

    def test_the_on_demand_price_of_another_type_is_not_taken_from_the_plan(self) -> None:
        other = event(0, "machine-up", "worker/0", usd_per_hour=3.6, instance="other", market="spot")
        assert report(other, *downs(10)).bill.on_demand_usd is None


_TIMES = st.floats(min_value=0, max_value=1e7)
_USD = st.floats(min_value=0, max_value=1000)
_HIRES = st.lists(
    st.tuples(st.sampled_from([f"{role}/{n}" for role in ("worker", "anchor", "memory") for n in range(3)]), _TIMES,
              _TIMES, _USD, _USD),
    max_size=30,
)  # fmt: skip


@example(hires=[("worker/0", 0.0, 5e-324, 0.0, 0.0)], ended=[True] * 30)
@settings(max_examples=60, deadline=None)
@given(hires=_HIRES, ended=st.lists(st.booleans(), min_size=30, max_size=30))
def test_money_and_machine_seconds_are_conserved(
    hires: list[tuple[str, float, float, float, float]], ended: list[bool]
) -> None:
    """Each machine comes and goes, one after another; some ends are never told: the next beginning is the end then."""
    events: list[Event] = [event(0.0, "run-started")]
    clock = 0.0
    expected = {"s": Fraction(0), "usd": Fraction(0), "on_demand": Fraction(0)}
    up: dict[str, tuple[float, float, float]] = {}

    def end(name: str, at_s: float) -> None:
        if name in up:
            since_s, usd, on_demand = up.pop(name)
            seconds = Fraction(at_s - since_s)
            expected["s"] += seconds
            expected["usd"] += seconds * Fraction(usd) / 3600
            expected["on_demand"] += seconds * Fraction(on_demand) / 3600

    for (name, wait_s, stay_s, usd, on_demand), told in zip(hires, ended, strict=False):
        clock += wait_s
        end(name, clock)
        events.append(event(clock, "machine-up", name, usd_per_hour=usd, on_demand_usd_per_hour=on_demand))
        up[name] = (clock, usd, on_demand)
        clock += stay_s
        if told:
            events.append(event(clock, "machine-down", name, why="lost"))
            end(name, clock)
    for name in list(up):
        end(name, max(each.at_s for each in events))
    bill = report(*events).bill
    assert bill.usd is not None
    assert bill.on_demand_usd is not None
    assert bill.usd == math.fsum(role.usd or 0.0 for role in bill.roles)
    assert bill.on_demand_usd == math.fsum(role.on_demand_usd or 0.0 for role in bill.roles)
    assert bill.machine_s == math.fsum(role.machine_s for role in bill.roles)
    assert bill.machine_s == pytest.approx(float(expected["s"]), rel=1e-12)
    assert bill.usd == pytest.approx(float(expected["usd"]), rel=1e-12, abs=1e-300)
    assert bill.on_demand_usd == pytest.approx(float(expected["on_demand"]), rel=1e-12, abs=1e-300)
    assert sum(role.hires for role in bill.roles) == len(hires)


_ANY = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.integers())
_DATA = st.fixed_dictionaries(
    {},
    optional={
        "step": st.integers(0, 6) | _ANY,
        "seconds": st.floats(0, 10) | _ANY,
        "world_size": st.integers(1, 4) | _ANY,
        "state": st.sampled_from(["remote", "durable", "skipped", "failed"]) | _ANY,
        "why": st.sampled_from(["preempted", "lost", "ended"]) | _ANY,
        "machines": st.lists(st.sampled_from(NAMES)) | _ANY,
        **dict.fromkeys(("took_s", "stall_s", "usd_per_hour", "outcome", "changes", "place", "role", "choice"), _ANY),
    },
)
_EVENTS = st.builds(
    Event,
    at_s=st.floats(0, 100) | st.floats(),
    kind=st.sampled_from(sorted(KINDS)),
    machine=st.none() | st.sampled_from(NAMES),
    data=_DATA,
)


@settings(max_examples=100, deadline=None)
@given(events=st.lists(_EVENTS, max_size=25), now_s=st.none() | st.floats(0, 200))
def test_any_events_give_a_report_that_adds_up(events: list[Event], now_s: float | None) -> None:
    told = report(*events, now_s=now_s)
    numbered = [e for e in events if e.kind == "step" and type(e.data.get("step")) is int and is_time(e.at_s)]
    counted = [e for e in numbered if abs(e.data["step"]) <= LARGEST]
    assert told.steps_done + told.steps_repeated == len(counted)
    assert 0 <= told.steps_lost <= len(counted)
    assert told.goodput is None or 0 <= told.goodput <= 1
    assert min(told.wall_s, told.bill.machine_s, told.stalled_s, told.stood_still_s, told.repeated_s) >= 0
    for pause in told.pauses:
        assert math.fsum(pause.parts.values()) <= pause.seconds * (1 + 1e-9) + 1e-9
    json.dumps(told.to_json(), allow_nan=False)


@settings(max_examples=30, deadline=None)
@given(
    every=st.integers(1, 7),
    losses=st.lists(st.integers(1, 40), max_size=4),
    seconds=st.floats(0.01, 2),
    size=st.integers(1, 2),
)
def test_a_run_that_goes_back_to_its_last_checkpoint_repeats_what_it_lost_and_no_more(
    every: int, losses: list[int], seconds: float, size: int
) -> None:
    """A run of 40 steps, played: a loss after so many executions, a restore from the last save, and on."""
    clock, now, saved, executed = 10.0, 0, 0, 0
    events = [event(0, "run-started"), *ups(0)]
    pending = sorted(losses)
    while now < 40:
        clock, now, executed = clock + seconds, now + 1, executed + 1
        events.append(step(clock, now, seconds, size))
        if now % every == 0:
            saved = now
            events.append(save(clock, now))
        if pending and executed >= pending[0] and now < 40:
            pending.pop(0)
            events += downs(clock + 0.5, "preempted", ["worker/1"])
            events += ups(clock + 1, ["worker/1"])
            events += [event(clock + 2, "group"), event(clock + 3, "restored", "worker/0", step=saved, seconds=0.5)]
            clock, now = clock + 3, saved
    events += [event(clock, "run-ended", outcome="finished"), *downs(clock)]
    told = report(*events)
    assert (told.steps_done, told.steps_done + told.steps_repeated) == (40, executed)
    assert told.steps_repeated == told.steps_lost
    assert len(told.pauses) == len(losses) - len(pending)
    assert told.stood_still_s == pytest.approx(len(told.pauses) * (3.0 + seconds))
    assert told.useful_machine_s == pytest.approx(40 * seconds * size)
    assert told.goodput is not None
    assert 0 < told.goodput < 1


def test_a_hundred_thousand_steps_are_one_report() -> None:
    def story() -> Iterable[Event]:
        yield from ups(0)
        for n in range(100_000):
            yield step(float(n), n)
            if n % 10 == 0:
                yield save(n + 0.5, n)
            if n % 1000 == 999:
                yield from downs(n + 0.5, "lost", ["worker/1"])
                yield event(n + 0.6, "group")
                yield event(n + 0.7, "restored", "worker/0", step=n, seconds=0.1)

    told = make_report(story(), CLUSTER, run="one")  # a quadratic one would meet the test's time-out
    assert (told.steps_done, len(told.pauses), told.checkpoints.made) == (100_000, 99 + 1, 10_000)


def test_the_wait_for_machines_that_the_market_does_not_have_is_not_regrouping() -> None:
    found = report(
        event(0, "run-started"), *ups(0), event(1, "group", machines=["worker/0", "worker/1"]),
        step(10, 1), step(11, 2),
        event(12, "machine-down", "worker/1", why="preempted"),
        event(12, "machine-refused", "worker/1", why="none"), event(40, "machine-refused", "worker/1", why="none"),
        event(52, "machine-up", "worker/1"),
        event(55, "group", machines=["worker/0", "worker/1"], took_s=43.0),
        event(60, "restored", "worker/0", step=2, seconds=1.0), step(62, 3), event(63, "run-ended", outcome="finished"),
    )  # fmt: skip
    (pause,) = found.pauses
    assert pause.parts == {
        "detect_s": 1, "capacity_s": 40, "regroup_s": 3, "start_s": 4.0, "restore_s": 1.0, "first_step_s": 2
    }  # fmt: skip
    assert sum(pause.parts.values()) == pause.seconds
