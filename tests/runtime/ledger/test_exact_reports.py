"""Whole reports of long runs that lose machines, wait for others, save and restore: every figure in them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepvm.events import Event
from deepvm.performance.measured import Machine, Provenance
from deepvm.runtime.ledger.market_record import market_traces
from deepvm.runtime.ledger.measured import measured_profile
from deepvm.runtime.ledger.report import make_report
from tests.runtime.ledger.test_report import CLUSTER, downs, event, step, ups
from tests.support.documents import assert_document

DOCUMENTS = Path(__file__).with_name("documents")
WORKERS = ("worker/0", "worker/1")


def story(seed: int) -> Iterator[Event]:
    """A run of two sessions: each loss has another cause, and each recovery another part that takes its time."""
    chance = random.Random(seed)
    now_s, number, saved = 100.0 * seed, 0, 0
    for session in range(2):
        yield event(now_s, "run-started", resumed=session > 0)
        for name in CLUSTER.machines:
            yield event(now_s, "machine-asked", name.name, market=name.market, usd_per_hour=name.usd_per_hour)
        yield from ups(now_s + 2)
        now_s += 3
        for number_of_group, why in enumerate(("preempted", "failed", "lost", "left"), start=1):
            yield event(
                now_s, "group", round=number_of_group, world_size=2, machines=list(WORKERS), took_s=chance.random()
            )
            if number_of_group > 1 or session:
                for rank, name in enumerate(WORKERS):
                    seconds = round(0.5 + chance.random(), 3)
                    yield event(
                        now_s + 1 + rank, "restored", name, step=saved, rank=rank, place="memory://m:1",
                        seconds=seconds, fetched=rank == 0,
                    )  # fmt: skip
                number = saved
                now_s += 3
            for _ in range(chance.randrange(3, 9)):
                number += 1
                now_s += round(1 + chance.random(), 3)
                yield step(now_s, number, seconds=round(0.8 + 0.2 * chance.random(), 3))
                if number % 3 == 0:
                    state = chance.choice(["remote", "remote", "skipped", "failed"])
                    data = {"stall_s": 0.125, "seconds": 0.5, "bytes": 1000 * number, "place": "memory://m:1"}
                    yield event(now_s + 0.1, "save", "worker/0", step=number, state=state, rank=0, **data)
                    if state == "remote":
                        saved = number
                        yield event(
                            now_s + 0.4,
                            "save",
                            "worker/0",
                            step=number,
                            state="durable",
                            place="file:///c",
                            seconds=2.0,
                        )
            lost = WORKERS[number_of_group % 2]
            if why in ("preempted", "left"):
                yield event(now_s + 0.2, "notice", lost, seconds_left=30.0, source="aws", action="terminate")
                choice = chance.choice(["save", "finish", "rely"])
                yield event(now_s + 0.3, "decision", lost, choice=choice, why="as measured", step=number)
            now_s += 1
            yield event(now_s, "machine-down", lost, why=why, exit_code=-9 if why == "failed" else None)
            if why == "lost":
                yield event(now_s + 1, "machine-refused", lost, why="sold out", usd_per_hour=0.3, market="spot")
                yield event(now_s + 2, "warning", text="no spot g for worker/1 now")
                yield event(now_s + 5, "replanned", lost, changes=["worker/1 is h (spot) instead of g"])
                now_s += 6
            now_s += 2
            yield event(now_s, "machine-up", lost, usd_per_hour=0.5, on_demand_usd_per_hour=None, instance="h")
            now_s += 4
        if session:
            yield event(now_s, "run-ended", outcome="finished")
        yield from downs(now_s + 1)
        now_s += 500


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_report_of_a_long_run_is_this(seed: int) -> None:
    events = list(story(seed))
    assert_document(make_report(events, CLUSTER, run="long").to_json(), DOCUMENTS / f"long-{seed}.json")
    half = make_report(events[: len(events) // 2], CLUSTER, events[-1].at_s, run="long").to_json()
    assert_document(half, DOCUMENTS / f"half-{seed}.json")


@pytest.mark.parametrize("seed", [1, 2])
def test_what_a_long_run_measured_and_what_the_market_did_to_it_is_this(seed: int) -> None:
    events = list(story(seed))
    where = Provenance(machine=Machine(cpu="x", cores=2), date="2026-11-18")
    report = make_report(events, CLUSTER, run="long")
    found = measured_profile(events, report, workload="digits", provenance=where)
    assert found is not None
    traces = [
        [one.zone, one.machines, one.gap_s, one.accelerator, one.up.tolist()[::5]]
        for one in market_traces(events, CLUSTER)
    ]
    document = {name: value for name, value in found.to_json().items() if name not in ("format", "provenance")}
    assert_document({**document, "traces": traces}, DOCUMENTS / f"measured-{seed}.json")
