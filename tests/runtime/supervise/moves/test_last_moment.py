"""When a gang goes on demand to keep a deadline, and when it returns: as the simulator says, by the run's figures."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deepvm.events import Event
from deepvm.market.market import market_of
from deepvm.market.trace import Trace, TraceKind
from deepvm.policy import parse_policy
from deepvm.policy.conduct import Conduct
from deepvm.policy.fallback import SafetyNet
from deepvm.runtime.backends.local.backend import LocalBackend
from deepvm.runtime.backends.local.played_market import Played, PlayedMarket
from deepvm.runtime.cluster import Cluster
from deepvm.runtime.ledger.report import Report, make_report
from deepvm.runtime.run_spec import RunSpec
from deepvm.runtime.supervise.moves.last_moment import Deadline, LastMoment, lacks_for_deadline, last_moment_of
from deepvm.simulate.job import GangJob
from deepvm.simulate.replay import replay
from deepvm.simulate.saves import PolicySaves
from deepvm.simulate.strategy import Strategy
from tests.support.runtime.machines import machine

STEP_S, START_S, RESTORE_S, STALL_S, SAVE_S = 10.0, 30.0, 4.0, 1.0, 3.0
STEPS, DEADLINE_S = 100, 1800.0
POLICY = parse_policy("every 5 steps")
CLUSTER = Cluster(
    machines=(machine("worker/0"), machine("worker/1"), machine("memory/0", "on-demand")), architecture="tiering",
    catalog="c", checkpoint_bytes=1, restore_s=3.0,
)  # fmt: skip


class Clock:
    """Of the market, in seconds; and whether spot machines are up there."""

    def __init__(self, *, speed: float = 1.0) -> None:
        self.now_s, self.speed, self.up = 0.0, speed, False

    def elapsed_s(self) -> float:
        return self.now_s / self.speed

    def offered(self, cluster: Cluster) -> Cluster | None:
        return cluster if self.up else None


def last_moment(clock: Clock, *, tries: int = 0, steps: int | None = STEPS, work_s: float = 500.0) -> LastMoment:
    deadline = Deadline(hours=DEADLINE_S / 3600, work_h=work_s / 3600, steps=steps, still_h=0.01)
    return LastMoment(
        deadline, SafetyNet(tries=tries), saves=POLICY, elapsed_s=clock.elapsed_s, speed=clock.speed,
        offered=clock.offered,
    )  # fmt: skip


def train(found: LastMoment, *, speed: float = 1.0, steps: int = 5) -> None:
    """Let it observe two groups, of which the second restored a checkpoint."""

    def observe(at_s: float, kind: str, **data: object) -> None:
        scaled = {name: value / speed if isinstance(value, float) else value for name, value in data.items()}
        found.pace.observe(Event(at_s=at_s / speed, kind=kind, machine="worker/0", data=scaled))

    for begin_s, restore_s in ((0.0, 0.0), (500.0, RESTORE_S)):
        observe(begin_s, "machine-up")
        observe(begin_s + 20, "group", world_size=2)
        if restore_s:
            observe(begin_s + START_S + restore_s, "restored", step=0, seconds=restore_s)
        for step in range(1, steps + 1):
            at_s = begin_s + START_S + restore_s + step * STEP_S
            slow_s = 5.0 if step == 1 else 0.0  # the first step of a group is not typical
            observe(at_s + slow_s, "step", step=step, seconds=STEP_S + slow_s, world_size=2)
        observe(begin_s + 90, "save", step=5, state="remote", rank=0, seconds=SAVE_S, stall_s=STALL_S)


@pytest.mark.parametrize("tries", [0, 2])
@pytest.mark.parametrize("speed", [1.0, 600.0])
def test_a_gang_goes_on_demand_at_the_moment_of_the_simulator(tries: int, speed: float) -> None:
    clock = Clock(speed=speed)
    found = last_moment(clock, tries=tries)
    train(found, speed=speed)
    hired_s = next(
        now_s
        for now_s in range(400, 3600)
        if setattr(clock, "now_s", now_s) is None
        and found.decide(CLUSTER, whole=False, trained=36, safe=35) is not None
    )
    up = np.where(np.arange(1000) < 40, 2, 0).astype(np.int32)  # until the 400th second
    trace = Trace(zone="a", machines=2, gap_s=10.0, up=up, kind=TraceKind.HELD)
    job = GangJob(work_h=STEPS * STEP_S / 3600, machines=2, deadline_h=DEADLINE_S / 3600)
    saves = PolicySaves(
        policy=POLICY, work_h=job.work_h, step_h=STEP_S / 3600, stall_h=STALL_S / 3600,
        remote_h=(SAVE_S - STALL_S) / 3600,
    )  # fmt: skip
    strategy = Strategy(
        name="x", saves=saves, fallback=SafetyNet(tries=tries), start_h=START_S / 3600, restore_h=RESTORE_S / 3600
    )
    outcome = replay(market_of([trace], name="m", spot_usd=0.1, on_demand_usd=0.5), job, strategy, [0.0])
    assert outcome.finished.all()
    assert outcome.hours[0] * 3600 <= DEADLINE_S
    simulated_s = float(outcome.hours[0] - outcome.on_demand_h[0]) * 3600
    assert simulated_s - 1e-6 <= hired_s < simulated_s + 1


def test_the_whole_gang_is_on_demand_then_at_its_price_and_the_user_reads_when_and_why() -> None:
    clock = Clock()
    found = last_moment(clock)
    train(found)
    clock.now_s = DEADLINE_S
    moved = found.decide(CLUSTER, whole=False, trained=36, safe=35)
    assert moved is not None
    cluster, (what, why, price) = moved
    assert [(m.name, m.market, m.usd_per_hour) for m in cluster.machines] == [
        ("worker/0", "on-demand", 0.53), ("worker/1", "on-demand", 0.53), ("memory/0", "on-demand", 0.16)
    ]  # fmt: skip
    assert found.hired == {"worker/0", "worker/1"}
    assert "the gang of 2 goes on demand" in what
    assert "30 min after the start" in what
    assert "no spot machines are up" in what
    assert "100 steps in all" in why
    assert "a step takes 10 s, a start takes 30 s, a restore 4 s" in why
    assert "$1.2200/h" in price
    assert found.decide(cluster, whole=False, trained=36, safe=35) is None, "once"


def test_a_gang_that_is_whole_is_left_alone_and_one_with_spot_machines_tries_them_once_more() -> None:
    clock = Clock()
    found = last_moment(clock, tries=3)
    train(found)
    clock.now_s = DEADLINE_S
    assert found.decide(CLUSTER, whole=True, trained=36, safe=35) is None
    clock.now_s = 900.0  # the last moment is at 1800 - 662 - 122, and three tries of 122 s before it
    clock.up = True
    assert found.decide(CLUSTER, whole=False, trained=36, safe=35) is None
    clock.up = False
    assert found.decide(CLUSTER, whole=False, trained=36, safe=35) is not None


def test_it_returns_to_spot_machines_while_time_is_left_for_a_try() -> None:
    clock = Clock()
    found = last_moment(clock, tries=3)
    train(found)
    clock.now_s = 900.0
    moved = found.decide(CLUSTER, whole=False, trained=36, safe=35)
    assert moved is not None
    clock.up, clock.now_s = True, 950.0
    assert found.decide(moved[0], whole=True, trained=35, safe=35) is None, "it does not train yet"
    train(found)
    back = found.decide(moved[0], whole=True, trained=45, safe=40)
    assert back is not None
    assert back[0] == CLUSTER
    assert "returns to spot machines" in back[1][0]
    assert not found.hired

    found = last_moment(clock, tries=3)
    train(found)
    clock.up = False
    moved = found.decide(CLUSTER, whole=False, trained=36, safe=35)
    assert moved is not None
    train(found)
    clock.up, clock.now_s = True, 1100.0
    assert found.decide(moved[0], whole=True, trained=36, safe=35) is None, "no time is left for a try"


def test_without_tries_it_stays_on_demand_to_the_end() -> None:
    clock = Clock()
    found = last_moment(clock)
    train(found)
    clock.now_s = 1200.0
    moved = found.decide(CLUSTER, whole=False, trained=36, safe=35)
    assert moved is not None
    train(found)
    clock.up, clock.now_s = True, 1210.0
    assert found.decide(moved[0], whole=True, trained=99, safe=95) is None


def test_before_anything_is_measured_the_plans_figures_count() -> None:
    clock = Clock()
    found = last_moment(clock, work_s=500.0)
    clock.now_s = DEADLINE_S - 500 - 2 * 36 - 1
    assert found.decide(CLUSTER, whole=False, trained=0, safe=0) is None
    clock.now_s += 2
    moved = found.decide(CLUSTER, whole=False, trained=0, safe=0)
    assert moved is not None
    assert "nothing is measured yet" in moved[1][1]


def test_without_the_number_of_steps_the_plans_hours_are_the_work() -> None:
    clock = Clock()
    found = last_moment(clock, steps=None, work_s=500.0)
    train(found)
    clock.now_s = DEADLINE_S - 150 - 2 * 34 - 70  # 35 of 50 steps of 10 s are done
    assert found.decide(CLUSTER, whole=False, trained=36, safe=35) is None
    clock.now_s += 70
    moved = found.decide(CLUSTER, whole=False, trained=36, safe=35)
    assert moved is not None
    assert "the plan's hours" in moved[1][1]


def test_a_deadline_that_cannot_be_kept_costs_nothing_and_is_reported_once() -> None:
    clock = Clock()
    found = last_moment(clock, steps=181)
    train(found)
    clock.now_s = 1700.0
    for _ in range(2):
        assert found.decide(CLUSTER, whole=False, trained=36, safe=35) is None
    (warning,) = found.take_warnings()
    assert "cannot be kept" in warning
    unpriced = replace(CLUSTER, machines=tuple(replace(m, on_demand_usd_per_hour=None) for m in CLUSTER.machines))
    found = last_moment(clock)
    assert found.decide(unpriced, whole=False, trained=0, safe=0) is None
    (warning,) = found.take_warnings()
    assert "no on-demand price" in warning
    dear = replace(CLUSTER, plan={"request": {"budget_usd": 1.2}})
    found = last_moment(clock)
    assert found.decide(dear, whole=False, trained=0, safe=0) is None
    (warning,) = found.take_warnings()
    assert "$1.2200/h, more than the budget of $1.2000/h" in warning
    assert found.decide(replace(dear, plan={"request": {"budget_usd": 1.22}}), whole=False, trained=0, safe=0)


@pytest.mark.parametrize("played", [False, True])
def test_the_time_between_two_sessions_counts_but_not_in_a_played_market(tmp_path: Path, played: bool) -> None:
    late = Conduct(fallback="on-demand at the last moment", fallback_tries=2)
    planned = replace(CLUSTER, conduct=late, deadline_s=36_000.0, work_h=0.5)
    sessions = [
        Event(at_s=time.time() - 50_000, kind="run-started"),
        Event(at_s=time.time() - 49_990, kind="run-ended"),
    ]
    market = None
    if played:
        trace = Trace(zone="a", machines=2, gap_s=10.0, up=np.array([2], dtype=np.int32), kind=TraceKind.HELD)
        rule = Played(path=tmp_path, meaning="up", speed=60.0)
        rows = {"g4dn.xlarge": (market_of([trace], name="m", spot_usd=0.1, on_demand_usd=0.5), rule)}
        market = PlayedMarket(LocalBackend(RunSpec(script="x.py")), rows)
    read: list[Report] = []

    def read_earlier() -> Report:
        read.append(make_report(sessions, planned, run="r"))
        return read[-1]

    spec = RunSpec(script="x.py", steps=5)
    found = last_moment_of(planned, spec, read_earlier=read_earlier, market=market, gang=None)
    assert found is not None
    moved = found.decide(planned, whole=False, trained=0, safe=0)
    assert (moved is None) == played, "ten seconds were ten minutes of the played market"
    for plain in (replace(planned, conduct=None), replace(planned, conduct=Conduct()), CLUSTER):
        assert last_moment_of(plain, spec, read_earlier=read_earlier, market=market, gang=None) is None
    assert len(read) == 1, "no other run reads its ledger for that"


def test_a_note_says_what_is_not_known_for_the_deadline() -> None:
    plain = replace(CLUSTER, conduct=Conduct())
    late = replace(CLUSTER, conduct=Conduct(fallback="on-demand at the last moment"))
    assert lacks_for_deadline(plain, None) == ()
    assert "no effect" in lacks_for_deadline(plain, 5)[0]
    assert "stays on spot" in lacks_for_deadline(late, 5)[0]
    known = replace(late, deadline_s=3600.0, work_h=0.5)
    assert lacks_for_deadline(known, 5) == ()
    assert "30 min of work: give --steps" in lacks_for_deadline(known, None)[0]
