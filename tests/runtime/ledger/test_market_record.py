"""What the market did to a run, as traces that the simulator reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepvm.errors import UsageError
from deepvm.events import Event
from deepvm.market.market import market_of
from deepvm.market.trace import Trace, TraceKind, load_traces
from deepvm.market.trace_writer import write_trace
from deepvm.runtime.cluster import Cluster, billing_facts
from deepvm.runtime.ledger.market_record import market_traces
from tests.support.runtime.machines import machine

WORKERS = tuple(replace(machine(f"worker/{i}"), region="us-east-1", zone="us-east-1a") for i in range(2))
PLAN = {"instances": [{"instance": "g4dn.xlarge", "accelerator": "T4"}]}
CLUSTER = Cluster(
    machines=(*WORKERS, machine("memory/0", "on-demand")), architecture="tiering", catalog="c", checkpoint_bytes=None,
    restore_s=None, plan=PLAN,
)  # fmt: skip
BEGIN_S = 1_790_000_000.0


def event(at_s: float, kind: str, name: str | None = None, **data: Any) -> Event:
    facts: dict[str, Any] = {}
    if kind in ("machine-asked", "machine-up", "machine-refused") and name is not None:
        found = next(m for m in CLUSTER.machines if m.name == name)
        facts = billing_facts(found)
    return Event(at_s=BEGIN_S + at_s, kind=kind, machine=name, data={**facts, **data})


def asked(at_s: float, name: str, **data: Any) -> list[Event]:
    return [event(at_s, "machine-asked", name, **data), event(at_s + 0.02, "machine-up", name, **data)]


def traces_of(*events: Event | list[Event], tick_s: float | None = 1.0) -> list[Trace]:
    flat = [one for each in events for one in (each if isinstance(each, list) else [each])]
    return market_traces(flat, CLUSTER, tick_s)


def test_losses_refusals_and_machines_that_come_back_are_a_trace_of_held_machines() -> None:
    (found,) = traces_of(
        event(0, "run-started"), asked(0.0, "worker/0"), asked(0.1, "worker/1"), asked(0.1, "memory/0"),
        event(2.5, "machine-down", "worker/1", why="preempted"), event(2.5, "machine-refused", "worker/1"),
        event(4.2, "machine-down", "worker/0", why="lost"), event(4.3, "machine-refused", "worker/0"),
        asked(6.5, "worker/1", usd_per_hour=0.2), asked(7.5, "worker/0", usd_per_hour=0.2),
        event(9.0, "step", "worker/0", step=3),
        event(9.4, "machine-down", "worker/0", why="ended"), event(9.5, "machine-down", "worker/1", why="stopped"),
        event(9.6, "run-ended"),
    )  # fmt: skip
    assert (found.zone, found.machines, found.accelerator, found.kind) == ("us-east-1a", 2, "T4", TraceKind.HELD)
    assert found.up.tolist() == [2, 2, 1, 1, 0, 0, 1, 2, 2]
    assert found.start is not None
    assert found.start.timestamp() == BEGIN_S
    assert found.prices is not None
    assert found.prices.tolist() == [0.16] * 6 + [0.2] * 3


def test_a_machine_that_is_replaced_at_once_was_lost_all_the_same() -> None:
    (found,) = traces_of(
        asked(0.0, "worker/0"), event(3.2, "machine-down", "worker/0", why="preempted"), asked(3.3, "worker/0"),
        event(6.0, "step", step=1), tick_s=1.0,
    )  # fmt: skip
    assert found.up.tolist() == [1, 1, 1, 0, 1, 1]


def test_workers_that_fail_by_themselves_are_not_the_markets_doing() -> None:
    (found,) = traces_of(
        asked(0.0, "worker/0"), event(3.2, "machine-down", "worker/0", why="failed"), asked(3.3, "worker/0"),
        event(6.0, "step", step=1),
    )  # fmt: skip
    assert found.up.tolist() == [1] * 6


def test_each_zone_and_each_session_is_a_trace_of_its_own() -> None:
    there = {"zone": "us-west-2b", "region": "us-west-2"}
    found = traces_of(
        event(0, "run-started"), asked(0.0, "worker/0"), event(2.0, "machine-down", "worker/0", why="preempted"),
        event(2.1, "machine-refused", "worker/0"), event(2.2, "machine-refused", "worker/0", zone="eu-west-1a"),
        asked(3.0, "worker/0", **there), event(5.0, "step", step=1),
        event(5.5, "machine-down", "worker/0", why="ended"),
        event(100.0, "run-started"), asked(100.0, "worker/0", **there), event(104.0, "step", step=2),
    )  # fmt: skip
    assert [(one.zone, one.up.tolist()) for one in found] == [
        ("us-east-1a", [1, 1, 0]),
        ("us-west-2b", [1, 1]),
        ("us-west-2b", [1, 1, 1, 1]),
    ]


def test_a_run_that_held_nothing_on_spot_has_no_trace() -> None:
    assert traces_of(asked(0.0, "memory/0"), event(1.0, "machine-refused", "worker/0"), event(9.0, "step")) == []
    with pytest.raises(UsageError, match="above zero"):
        traces_of(asked(0.0, "worker/0"), event(5.0, "step"), tick_s=0.0)


def test_what_is_written_is_what_the_simulator_reads(tmp_path: Path) -> None:
    (found,) = traces_of(
        asked(0.0, "worker/0"), asked(0.1, "worker/1"), event(2.5, "machine-down", "worker/1", why="preempted"),
        event(5.0, "step", step=1),
    )  # fmt: skip
    path = write_trace(found, tmp_path, name="digits")
    assert path == tmp_path / "preemption" / "2-node" / "digits" / "us-east-1a_T4_1.json"
    ((name, (read,)),) = load_traces(tmp_path, meaning="up").items()
    assert name == "preemption/2-node/digits"
    assert (read.zone, read.machines, read.kind, read.gap_s, read.start) == (
        found.zone, found.machines, found.kind, found.gap_s, found.start,
    )  # fmt: skip
    assert np.array_equal(read.up, found.up)
    assert market_of([read], on_demand_usd=0.5).price.tolist() == [[0.16] * 5]


@pytest.mark.parametrize(
    ("lasted_s", "tick_s", "ticks"),
    [(0.5, 1.0, 1), (3600, 1.0, 3600), (3601, 10.0, 360), (86400, 10.0, 8640), (86401, 60.0, 1440)],
)
def test_the_longer_a_record_the_longer_its_ticks(lasted_s: float, tick_s: float, ticks: int) -> None:
    (found,) = traces_of(asked(0.0, "worker/0"), event(lasted_s, "step", step=1), tick_s=None)
    assert (found.gap_s, found.up.tolist()) == (tick_s, [1] * ticks)


def test_a_record_of_more_ticks_than_a_trace_may_have_is_refused() -> None:
    run = (asked(0.0, "worker/0"), event(5.0, "step", step=1))
    with pytest.raises(UsageError, match=r"5 s in ticks of 5e-07 s are more than 5,000,000 ticks: give longer"):
        traces_of(*run, tick_s=5e-7)


def test_machines_of_a_ledger_that_the_plan_lacks_are_known_by_what_events_say() -> None:
    facts = {"instance": "p3.2xlarge", "market": "spot", "usd_per_hour": 0.9}
    stranger = Event(at_s=BEGIN_S, kind="machine-asked", machine="worker/7", data=facts)
    bare = Event(at_s=BEGIN_S + 1, kind="machine-up", machine="worker/8", data={"market": "spot"})
    known = Event(at_s=BEGIN_S + 1, kind="machine-asked", machine="worker/1", data={})
    by_region = Event(at_s=BEGIN_S + 1, kind="machine-asked", machine="worker/0", data={"region": "us-east-1"})
    found = traces_of(stranger, bare, known, by_region, event(4.0, "save", step=1))
    assert [(one.zone, one.accelerator, one.machines, one.up.tolist()) for one in found] == [
        ("unknown", "p3.2xlarge", 1, [1, 1, 1, 1]),
        ("unknown", "machine", 1, [1, 1, 1]),
        ("unknown", "T4", 1, [1, 1, 1]),
        ("us-east-1", "T4", 1, [1, 1, 1]),
    ]
    assert found[1].prices is None
