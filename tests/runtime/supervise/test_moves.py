"""A supervisor moves a gang: ranks save, machines end where they are, and are requested where they belong."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepvm.events import Event
from deepvm.policy import parse_policy
from deepvm.policy.conduct import Conduct
from deepvm.policy.fallback import SafetyNet
from deepvm.policy.loss import AfterLoss
from deepvm.runtime.backends.base import Change, NoCapacity
from deepvm.runtime.cluster import Cluster, Machine
from deepvm.runtime.hub.client import HubClient
from deepvm.runtime.hub.hub import Hub
from deepvm.runtime.ledger.ledger import Ledger
from deepvm.runtime.ledger.market_record import market_traces
from deepvm.runtime.ledger.report import make_report
from deepvm.runtime.run_spec import RunSpec
from deepvm.runtime.supervise.fault_injection import Faults, parse_faults
from deepvm.runtime.supervise.gang import Gang
from deepvm.runtime.supervise.local_supervisor import Supervisor
from deepvm.runtime.supervise.machine_requests import MachineRequests
from deepvm.runtime.supervise.moves.last_moment import Deadline, LastMoment
from deepvm.runtime.supervise.replan import Replanned, Replanner
from tests.support.runtime.machines import machine
from tests.support.waiting import wait_until

TOKEN, WAIT_S = "t" * 32, 20.0
A, B = "us-east-1a", "us-east-1b"
WORKERS = tuple(replace(machine(f"worker/{i}"), region="us-east-1", zone=A, usd_per_hour=0.1) for i in range(2))
CLUSTER = Cluster(
    machines=(*WORKERS, machine("memory/0", "on-demand")), architecture="tiering", catalog="c", checkpoint_bytes=1,
    restore_s=3.0, conduct=Conduct(zones=(A, B)), plan={"request": {"budget_usd": 3.0}},
)  # fmt: skip


class Market:
    """A backend of machines that only talk to the hub, and their market: (capacity, price) by zone."""

    def __init__(self, hub: Hub) -> None:
        self.rows = {A: (2, 0.1), B: (2, 0.16)}
        self.requested: list[tuple[str, str | None]] = []
        self.links: dict[str, HubClient] = {}
        self._hub, self._changes = hub, list[Change]()
        self._stopped: set[str] = set()  # by the hub
        self.polls = 0

    def zones(self, instance: str) -> tuple[str, ...]:
        return tuple(self.rows)

    def capacity(self, instance: str, zone: str) -> int:
        return self.rows[zone][0]

    def quote(self, machine: Machine) -> Machine:
        if machine.market != "spot" or machine.zone not in self.rows:
            return machine
        return replace(machine, usd_per_hour=self.rows[machine.zone][1])

    def up(self, machines: Sequence[Machine]) -> None:
        for each in machines:
            if each.market == "spot" and each.zone is not None and not self.rows[each.zone][0]:
                raise NoCapacity(each, "sold out")
            self.requested.append((each.name, each.zone))
            self._stopped.discard(each.name)
            self.links[each.name] = self._connect(each.name)
            self._changes.append(Change(machine=each.name, state="up"))

    def _connect(self, name: str) -> HubClient:
        def saves(message: Mapping[str, Any]) -> None:
            event = Event.now("save", step=message["step"], state="remote", seconds=0.1)
            link.send("event", line=event.to_line())

        link = HubClient.connect(
            self._hub.address, token=TOKEN, machine=name, address="127.0.0.1", workers=1, connect_s=WAIT_S
        )
        link.start(on_notice=saves, on_broken=lambda: None, on_end=lambda _: self._stopped.add(name))
        if name == "memory/0":
            link.send("memory", address="127.0.0.1:7070")
        else:
            link.send("join")
        return link

    def poll(self) -> Sequence[Change]:
        self.polls += 1
        for name in [name for name in self.links if name in self._stopped]:
            self._end(name, "ended")
        changes, self._changes = self._changes, []
        return changes

    def preempt(self, name: str, *, notice_s: float) -> None:
        self._end(name, "preempted")

    def take(self, *names: str) -> None:
        """Preempt machines at the same moment."""
        for name in names:
            self.links.pop(name).close()
        self._changes += [Change(machine=name, state="down", why="preempted") for name in names]

    def down(self, names: Sequence[str] | None = None, *, within_s: float = 10.0) -> None:
        for name in list(self.links) if names is None else names:
            self._end(name, "stopped")

    def _end(self, name: str, why: str) -> None:
        if (link := self.links.pop(name, None)) is not None:
            link.close()
            self._changes.append(Change(machine=name, state="down", why=why))

    def group(self, rounds: int) -> bool:
        formed = self._hub.round
        return formed is not None and formed.number >= rounds

    def steps(self, step: int, *, later_s: float = 0.0) -> None:
        """A trainer reports a finished step."""
        event = Event.now("step", at_s=time.time() + later_s, step=step, seconds=0.1, world_size=2)
        self.links["worker/0"].send("event", line=event.to_line())
        wait_until(lambda: self._hub.progress.step == step, f"step {step}", timeout_s=WAIT_S)

    def finish(self) -> None:
        for name in ("worker/0", "worker/1"):
            self.links[name].send("finished")


@pytest.fixture
def hub() -> Iterator[Hub]:
    with closing(Hub(CLUSTER.machines, RunSpec(run="r", script="x.py"), token=TOKEN).start()) as found:
        yield found


@contextmanager
def supervised(
    folder: Path, hub: Hub, *, threshold: float | None, clock_h: list[float] | None = None, faults: str = ""
) -> Iterator[tuple[Market, list[Event]]]:
    """A supervisor in a thread of its own. The events of its ledger are there at the end."""
    market, events = Market(hub), list[Event]()
    gang = Gang(market, AfterLoss(), threshold=threshold)
    last_moment = None
    if clock_h is not None:
        last_moment = LastMoment(
            Deadline(hours=10.0, work_h=1.0, steps=None, still_h=0.01), SafetyNet(tries=1),
            saves=parse_policy("every 5 steps"), elapsed_s=lambda: clock_h[0] * 3600, offered=gang.offered,
        )  # fmt: skip
    with Ledger.create(folder / "ledger.sqlite", run="r", cluster=CLUSTER) as ledger:
        supervisor = Supervisor(
            gang.begin(CLUSTER), backend=market, hub=hub, ledger=ledger,
            faults=parse_faults(faults, CLUSTER.machines, 0) if faults else Faults(iter(()), []),
            replanner=Replanner(gang=gang), quote=market.quote, retry_s=0.05, reconsider_s=0.05,
            last_moment=last_moment,
        )  # fmt: skip
        thread = threading.Thread(target=supervisor.follow)
        thread.start()
        try:
            yield market, events
        finally:
            supervisor.interrupt()
            thread.join(WAIT_S)
            events += ledger.events()
    assert not thread.is_alive()


def test_ranks_save_before_a_gang_moves_to_a_cheaper_zone(tmp_path: Path, hub: Hub) -> None:
    with supervised(tmp_path, hub, threshold=0.3) as (market, events):
        wait_until(lambda: market.group(1), "the first group", timeout_s=WAIT_S)
        market.steps(7)
        market.rows[A] = (2, 0.5)
        wait_until(lambda: market.group(2), "the group in the other zone", timeout_s=WAIT_S)
        assert hub.progress.saved_step == 7
        market.finish()
        assert hub.finished.wait(WAIT_S)
    assert market.requested == [
        ("worker/0", A), ("worker/1", A), ("memory/0", None), ("worker/0", B), ("worker/1", B)
    ]  # fmt: skip
    kinds = [event.kind for event in events]
    assert kinds.index("save") < kinds.index("replanned")
    asked = [event for event in events if event.kind == "machine-asked"]
    assert [(event.machine, event.data["zone"], event.data["usd_per_hour"]) for event in asked[3:]] == [
        ("worker/0", B, 0.16), ("worker/1", B, 0.16)
    ]  # fmt: skip


def test_without_a_threshold_a_gang_stays_where_it_is(tmp_path: Path, hub: Hub) -> None:
    with supervised(tmp_path, hub, threshold=None) as (market, _):
        wait_until(lambda: market.group(1), "the first group", timeout_s=WAIT_S)
        market.rows[A] = (2, 0.5)
        for step in range(1, 4):
            market.steps(step)
        market.finish()
        assert hub.finished.wait(WAIT_S)
    assert len(market.requested) == 3


def test_survivors_follow_a_machine_that_is_granted_in_another_zone(tmp_path: Path, hub: Hub) -> None:
    with supervised(tmp_path, hub, threshold=None) as (market, events):
        wait_until(lambda: market.group(1), "the first group", timeout_s=WAIT_S)
        market.steps(3)
        market.rows = {A: (0, 0.1), B: (0, 0.16)}
        market.preempt("worker/1", notice_s=0.0)
        wait_until(lambda: hub.round is None, "the loss", timeout_s=WAIT_S)
        market.rows[B] = (2, 0.16)
        wait_until(lambda: market.group(2), "the group in the other zone", timeout_s=WAIT_S)
        market.finish()
        assert hub.finished.wait(WAIT_S)
    assert market.requested[3:] == [("worker/1", B), ("worker/0", B)]
    refused = [event for event in events if event.kind == "machine-refused"]
    assert [(event.machine, event.data["zone"]) for event in refused] == [("worker/1", A)], "once, however often"
    assert len([event for event in events if event.kind == "replanned"]) == 1


def test_a_gang_goes_on_demand_before_its_deadline_and_returns_when_spot_machines_are_up(
    tmp_path: Path, hub: Hub
) -> None:
    clock_h = [0.0]
    with supervised(tmp_path, hub, threshold=0.3, clock_h=clock_h) as (market, events):
        wait_until(lambda: market.group(1), "the first group", timeout_s=WAIT_S)
        market.steps(1)
        market.steps(2)
        market.rows = {A: (0, 0.1), B: (0, 0.16)}
        market.preempt("worker/0", notice_s=0.0)
        market.preempt("worker/1", notice_s=0.0)
        wait_until(lambda: hub.round is None, "the loss", timeout_s=WAIT_S)
        asked = len(market.requested)
        clock_h[0] = 9.0  # of ten hours; the work takes one
        wait_until(lambda: market.group(2), "the group on demand", timeout_s=WAIT_S)
        assert sorted(market.requested[asked:]) == [("worker/0", A), ("worker/1", A)]
        clock_h[0] = 2.0
        market.steps(1)
        market.rows[B] = (2, 0.16)
        market.steps(2, later_s=100.0)  # on demand for long enough
        wait_until(lambda: market.group(3), "the group on spot machines", timeout_s=WAIT_S)
        assert hub.progress.saved_step == 2, "all ranks save before they return"
        market.finish()
        assert hub.finished.wait(WAIT_S)
    there, back = (event.data["changes"] for event in events if event.kind == "replanned")
    assert "the gang of 2 goes on demand in us-east-1a" in there[0]
    assert "the gang of 2 returns to spot machines in us-east-1b" in back[0]
    report = make_report(events, CLUSTER, run="r")
    assert report.changes == (*there, *back)
    worker = report.bill.roles[0]
    assert worker.hires == 6
    assert 0 < worker.fallback_s < worker.machine_s
    assert worker.fallback_usd == pytest.approx(worker.fallback_s / 3600 * 0.53)
    assert "fallback_s" in json.dumps(report.to_json())
    asked = [event for event in events if event.kind == "machine-asked" and event.machine == "worker/0"]
    assert [(event.data["market"], event.data["usd_per_hour"]) for event in asked] == [
        ("spot", 0.1), ("on-demand", 0.53), ("spot", 0.16)
    ]  # fmt: skip
    traces = market_traces(events, CLUSTER, 0.001)
    assert all(trace.zone in (A, B) for trace in traces)
    assert traces[0].up[-1] == 0, "machines on demand are none of the market's"


def test_at_a_loss_after_the_last_moment_no_spot_machine_is_tried_any_more(tmp_path: Path, hub: Hub) -> None:
    clock_h = [0.0]
    with supervised(tmp_path, hub, threshold=None, clock_h=clock_h) as (market, events):
        wait_until(lambda: market.group(1), "the first group", timeout_s=WAIT_S)
        clock_h[0] = 9.5
        seen = market.polls
        wait_until(lambda: market.polls > seen + 2, "a look at the clock", timeout_s=WAIT_S)
        assert len(market.requested) == 3, "a gang that is whole stays"
        market.take("worker/0", "worker/1")
        wait_until(lambda: market.group(2), "the group on demand", timeout_s=WAIT_S)
        market.finish()
        assert hub.finished.wait(WAIT_S)
    assert market.requested[3:] == [("worker/0", A), ("worker/1", A)], "each of them once"
    (moved,) = (event.data["changes"] for event in events if event.kind == "replanned")
    assert "spot machines are up, but one more loss would break it" in moved[0]
    asked = [event.data["market"] for event in events if event.kind == "machine-asked"]
    assert asked == ["spot", "spot", "on-demand", "on-demand", "on-demand"]


def test_no_market_takes_a_machine_that_is_on_demand(tmp_path: Path, hub: Hub) -> None:
    clock_h = [9.0]
    with supervised(tmp_path, hub, threshold=None, clock_h=clock_h, faults="at:step:2:worker/1:notice=0s") as (
        market, events,
    ):  # fmt: skip
        wait_until(lambda: market.group(1), "the group", timeout_s=WAIT_S)
        for step in range(1, 5):
            market.steps(step)
        seen = market.polls
        wait_until(lambda: market.polls > seen + 2, "a fault that would be due", timeout_s=WAIT_S)
        market.finish()
        assert hub.finished.wait(WAIT_S)
    asked = [event.data["market"] for event in events if event.kind == "machine-asked"]
    assert asked == ["on-demand"] * 3, "the deadline was near from the start"
    assert not [event for event in events if event.data.get("why") == "preempted"]


def test_a_cluster_without_machines_that_keep_checkpoints_forms_a_group_all_the_same() -> None:
    with closing(Hub(WORKERS, RunSpec(run="r", script="x.py"), token=TOKEN).start()) as hub:
        market = Market(hub)
        market.up(WORKERS)
        wait_until(lambda: market.group(1), "the group", timeout_s=WAIT_S)
        market.down()


class Stubborn(Replanner):
    """A replanner that knows nothing but the place that was refused."""

    def instead_of(self, cluster: Cluster, lost: Machine, why: str) -> Replanned | None:
        return cluster, ("nothing else",)


def test_a_place_that_was_just_refused_is_asked_again_later_and_not_at_once() -> None:
    with closing(Hub(CLUSTER.machines, RunSpec(run="r", script="x.py"), token=TOKEN).start()) as hub:
        market, waits, events = Market(hub), list[str](), list[Event]()
        market.rows[A] = (0, 0.1)
        requests = MachineRequests(
            CLUSTER, market, replanner=Stubborn(), record=events.append,
            on_wait=lambda machine, _: waits.append(machine.name), retry_s=0.0,
        )  # fmt: skip
        requests.request([WORKERS[0]])
        assert waits == ["worker/0"]
        assert [event.kind for event in events] == ["machine-refused"]
        assert requests.cluster == CLUSTER
        assert [machine.name for machine in requests.due()] == ["worker/0"]
