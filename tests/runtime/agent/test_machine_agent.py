"""What a machine's process does with what the hub tells it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepvm.fetch.segment import PATH_VARIABLE
from deepvm.runtime.agent.__main__ import ENDED_BY, MachineAgent, _parser, main
from deepvm.runtime.agent.prefetch import segment_of
from deepvm.runtime.run_spec import RunSpec
from deepvm.runtime.workers.template import Template

Made = Callable[..., MachineAgent]


class StandIn:
    """A hub's client without a hub."""

    name, stores, ended = "worker/0", (), None

    def __init__(self, role: str, **spec: Any) -> None:
        self.role = role
        self.spec = RunSpec(run="r", script="train.py", **spec)
        self.said: list[str] = []

    def join(self) -> None:
        self.said.append("join")

    def send(self, what: str, **fields: Any) -> None:
        self.said.append(what)

    def forget(self) -> None: ...


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("t" * 32)

    def make(role: str = "worker", **spec: Any) -> MachineAgent:
        words = ["--hub", "127.0.0.1:1", "--name", "worker/0", "--token-file", str(token), "--folder", str(tmp_path)]
        hub: Any = StandIn(role, **spec)
        source: Any = SimpleNamespace(interval_s=60.0, poll=lambda: None)
        return MachineAgent(_parser().parse_args(words), hub, source)

    return make


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *each: found.append(each))
    return found


@pytest.mark.parametrize(("role", "signals"), [("worker", 1), ("anchor", 1), ("memory", 0)])
def test_a_machine_that_trains_is_signalled_at_the_end_of_the_run_and_one_that_only_keeps_ends_by_itself(
    made: Made, killed: list[tuple[int, int]], role: str, signals: int
) -> None:
    made(role)._on_end("the hub is gone")
    assert killed == [(os.getpid(), signal.SIGTERM)] * signals


def notice(**fields: Any) -> Mapping[str, Any]:
    return {"machine": "worker/1", "step": 5, "at_s": time.time() + 30, "choice": "save", **fields}


@pytest.mark.parametrize(
    ("told", "action"), [({}, "terminate"), ({"action": ""}, "terminate"), ({"action": "stop"}, "stop")]
)
def test_trainers_are_told_what_becomes_of_the_machine(made: Made, told: Mapping[str, str], action: str) -> None:
    agent = made()
    agent._on_notice(notice(**told))
    found = json.loads(agent.save_now.read_text())
    assert found["action"] == action
    assert time.time() < found["at_s"] <= time.time() + 30


def test_trainers_are_told_nothing_of_a_notice_for_which_no_save_is_made(made: Made) -> None:
    agent = made()
    agent._on_notice(notice(choice="rely"))
    assert not agent.save_now.exists()


@pytest.mark.parametrize(("after_loss", "said"), [("wait", ["join"]), ("wait:30s", []), ("shrink", [])])
def test_a_machine_joins_before_it_imports_torch_only_if_the_others_wait_for_it_anyway(
    made: Made, monkeypatch: pytest.MonkeyPatch, after_loss: str, said: list[str]
) -> None:
    agent = made(after_loss=after_loss)
    monkeypatch.setattr(agent._prefetcher, "begin", lambda stores: None)
    monkeypatch.setattr(Template, "fork_here", lambda **_: None)
    assert agent.fork_template() is False  # as in a worker of the template
    assert agent.hub.said == said  # type: ignore[attr-defined]


def test_what_cannot_be_done_ends_the_process_with_a_sentence_and_a_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {number: signal.getsignal(number) for number in ENDED_BY}
    words = ["--hub", "127.0.0.1:1", "--name", "w", "--token-file", str(tmp_path / "t"), "--folder", str(tmp_path)]
    try:
        assert main([*words, "--notices", "smoke"]) == 2
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    said = capsys.readouterr().err
    assert said.startswith("deepvm: ")
    assert "smoke" in said


@pytest.mark.parametrize(("role", "begun"), [("worker", [("10.0.0.9:7070",)]), ("anchor", []), ("memory", [])])
def test_a_worker_prefetches_from_the_runs_stores_while_it_imports_torch(
    made: Made, monkeypatch: pytest.MonkeyPatch, role: str, begun: list[tuple[str, ...]]
) -> None:
    monkeypatch.setattr(StandIn, "stores", ("10.0.0.9:7070",))
    agent, found = made(role), list[tuple[str, ...]]()
    monkeypatch.setattr(agent._prefetcher, "begin", found.append)
    monkeypatch.setattr(Template, "fork_here", lambda **_: None)
    agent.fork_template()
    assert found == begun


def test_a_trainer_gets_these_variables(made: Made, tmp_path: Path) -> None:
    agent = made(durable="file:///kept", replicas=2, policy="every 10 steps", planned_world_size=4, batch="global:64")
    agent.save_now.write_text("{}")
    assert agent._environment(("10.0.0.8:7070", "10.0.0.9:7070")) == {
        "DEEPVM_STORE": "memory://10.0.0.8:7070,10.0.0.9:7070?replicas=2 file:///kept",
        "DEEPVM_RUN": "r",
        "DEEPVM_POLICY": "every 10 steps",
        "DEEPVM_BATCH": "global:64",
        "DEEPVM_PLANNED_WORLD_SIZE": "4",
        "DEEPVM_EVENTS": str(agent.events),
        "DEEPVM_NOTICE_FILE": str(agent.save_now),
        "DEEPVM_TOKEN": "t" * 32,
        PATH_VARIABLE: str(segment_of(tmp_path)),
    }
    assert not agent.save_now.exists()
    assert agent._environment(())["DEEPVM_STORE"] == "file:///kept"
