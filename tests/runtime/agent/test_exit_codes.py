"""The exit code of a machine's process: 0 if the hub stopped the run, else what ended it."""

from __future__ import annotations

import signal
from typing import Any, cast

import pytest

from deepvm.runtime.agent import __main__ as agent
from deepvm.runtime.agent.__main__ import MachineAgent


class SignalException(Exception):
    """What torch's agent makes of a signal."""

    sigval = signal.SIGINT


class Agent:
    def __init__(self, error: BaseException | None, *, stopped: bool) -> None:
        self._error, self.stopped = error, stopped

    def run(self) -> int:
        if self._error is not None:
            raise self._error
        return 3


def ended(error: BaseException | None = None, *, stopped: bool = False) -> int:
    return agent._ended(cast(MachineAgent, Agent(error, stopped=stopped)))


@pytest.fixture(autouse=True)
def ignored(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Signals that are ignored from then on; this process keeps its own."""
    found: list[Any] = []
    monkeypatch.setattr(agent.signal, "signal", lambda number, action: found.append((number, action)))
    return found


def test_a_machine_that_ends_by_itself_tells_how(ignored: list[Any]) -> None:
    assert ended() == 3
    assert ignored == [(number, signal.SIG_IGN) for number in agent.ENDED_BY]
    assert ended(SignalException()) == 128 + signal.SIGINT
    with pytest.raises(SystemExit, match="5"):
        ended(SystemExit(5))
    with pytest.raises(ValueError, match="a bug"):
        ended(ValueError("a bug"))


@pytest.mark.parametrize("error", [SystemExit(143), SignalException(), ValueError("on the way out")])
def test_a_run_that_the_hub_stopped_has_ended_well(error: BaseException) -> None:
    assert ended(error, stopped=True) == 0


def test_the_first_signal_ends_a_machine_and_later_ones_do_not_interrupt_its_cleanup(ignored: list[Any]) -> None:
    with pytest.raises(SystemExit) as caught:
        agent._leave_once(signal.SIGTERM, None)
    assert caught.value.code == 143
    assert ignored == [(number, signal.SIG_IGN) for number in agent.ENDED_BY]
