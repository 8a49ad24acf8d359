"""What a display is told of a run: nothing trains before a step is finished, and a checkpoint is not forgotten."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from deepvm.cli.run.display import _checkpoint, _drawn, _step
from deepvm.events import Event
from deepvm.runtime.hub.progress import Progress
from deepvm.runtime.supervise import run_state as state_module
from deepvm.runtime.supervise.run_state import RunState
from tests.support.runtime.machines import machine

GROUP = {"round": 1, "world_size": 1, "machines": ["worker/0"]}


def event(kind: str, **data: object) -> Event:
    return Event(at_s=time.time(), kind=kind, machine="worker/0", data=data)


def state() -> RunState:
    made = RunState([machine("worker/0")])
    made.machines["worker/0"].up_at_s = time.time()
    return made


def test_a_machine_trains_once_a_step_is_finished_and_not_before() -> None:
    run, progress = state(), Progress()
    run.observe(event("group", **GROUP))
    view = run.view(progress, training=True, news=[])
    assert view.machines[0].state == "running"
    assert _step(view) == "no step yet on 1 rank"
    done = event("step", step=1, seconds=0.1, world_size=1)
    run.observe(done)
    progress.observe(done)
    view = run.view(progress, training=True, news=[])
    assert view.machines[0].state == "training"
    assert _step(view) == "step 1 on 1 rank"
    view = run.view(progress, training=False, news=[])
    assert view.machines[0].state == "waiting"
    assert _step(view) == "step 1, not training"


def test_a_resumed_run_knows_its_checkpoint_until_training_shows_that_it_is_gone() -> None:
    progress = Progress()
    progress.recall([event("save", step=30, state="remote"), event("save", step=40, state="failed")])
    view = state().view(progress, training=False, news=[])
    assert _checkpoint(view) == "checkpoint 30"
    progress.observe(event("restored", step=30, place="memory://m:1", seconds=0.1))
    view = state().view(progress, training=False, news=[])
    assert _checkpoint(view) == "checkpoint 30 in memory://m:1"
    lost = Progress()
    lost.recall([event("save", step=30, state="remote")])
    lost.observe(event("step", step=1, seconds=0.1, world_size=1))
    assert lost.saved_step is None


def test_a_script_that_tells_nothing_is_spoken_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run, progress = state(), Progress()
    assert run.silent_script(progress) is None
    run.observe(event("group", **GROUP))
    assert run.silent_script(progress) is None, "it may still start"
    monkeypatch.setattr(state_module, "SILENT_SCRIPT_S", 0.0)
    said = run.silent_script(progress)
    assert said is not None
    assert "deepvm.Checkpointer" in said
    assert run.silent_script(progress) is None


def test_a_script_that_calls_deepvm_gets_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    run, progress = state(), Progress()
    monkeypatch.setattr(state_module, "SILENT_SCRIPT_S", 0.0)
    run.observe(event("group", **GROUP))
    progress.observe(event("restored", step=3, place="memory://m:1", seconds=0.1))
    assert run.silent_script(progress) is None


def test_a_machine_costs_what_it_ran_for_and_nothing_before() -> None:
    run = RunState([machine("worker/0")])
    view = run.machines["worker/0"]
    assert view.cost_usd(time.time()) == 0.0
    for kind, at_s in (("machine-up", 1000.0), ("machine-down", 4600.0), ("machine-up", 9000.0)):
        run.observe(Event(at_s=at_s, kind=kind, machine="worker/0", data={}))
    assert view.cost_usd(10_800.0) == pytest.approx(0.16 * 1.5)


def test_the_table_of_machines_has_titles() -> None:
    shown = io.StringIO()
    Console(file=shown, width=100).print(_drawn(state().view(Progress(), training=False, news=[]), ""))
    assert shown.getvalue().strip().splitlines()[0].split() == ["machine", "what", "state", "for", "$/h", "cost"]
