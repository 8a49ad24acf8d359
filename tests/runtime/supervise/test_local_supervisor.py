"""A run on this host, supervised: what users are told of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from deepvm.events import Event
from deepvm.runtime.backends.base import Change
from deepvm.runtime.cluster import Cluster, Machine
from deepvm.runtime.hub.hub import Hub
from deepvm.runtime.ledger.ledger import Ledger
from deepvm.runtime.ledger.sqlite_file import LedgerError
from deepvm.runtime.run_spec import RunSpec
from deepvm.runtime.supervise.fault_injection import Faults
from deepvm.runtime.supervise.local_supervisor import Supervisor
from deepvm.runtime.supervise.run_state import View
from tests.support.runtime.machines import machine

MACHINES = (machine("worker/0"), machine("memory/0", "on-demand"))
CLUSTER = Cluster(machines=MACHINES, architecture="tiering", catalog="c", checkpoint_bytes=None, restore_s=None)


class Idle:
    """A backend whose machines never start; it knows which ones were ended, in order."""

    def __init__(self) -> None:
        self.ended: list[list[str] | None] = []

    def up(self, machines: Sequence[Machine]) -> None: ...

    def poll(self) -> Sequence[Change]:
        return ()

    def preempt(self, name: str, *, notice_s: float) -> None: ...

    def down(self, names: Sequence[str] | None = None, *, within_s: float = 10.0) -> None:
        self.ended.append(None if names is None else list(names))


@contextmanager
def interrupted(folder: Path, backend: Idle, watch: Callable[[View], None] = lambda _: None) -> Iterator[Supervisor]:
    """The supervisor of a run that is interrupted before it begins."""
    with (
        Ledger.create(folder / "ledger.sqlite", run="r", cluster=CLUSTER) as ledger,
        closing(Hub(MACHINES, RunSpec(run="r", script="x.py"), token="t" * 32).start()) as hub,
    ):
        found = Supervisor(CLUSTER, backend=backend, hub=hub, ledger=ledger, faults=Faults(iter(()), []), watch=watch)
        found.interrupt()
        yield found


def warnings_of(views: Iterable[View]) -> list[str]:
    return [event.data["text"] for view in views for event in view.news if event.kind == "warning"]


def test_machines_that_train_are_ended_before_those_that_keep_checkpoints(tmp_path: Path) -> None:
    backend = Idle()
    with interrupted(tmp_path, backend) as supervisor:
        assert supervisor.follow().outcome == "interrupted"
    assert backend.ended == [["worker/0"], ["memory/0"], None]


def test_events_that_the_ledger_lacks_at_the_end_are_counted_in_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    views: list[View] = []

    def full(self: Ledger, events: Iterable[Event]) -> None:
        raise LedgerError("the disk is full")

    with interrupted(tmp_path, Idle(), views.append) as supervisor:
        monkeypatch.setattr(Ledger, "append", full)
        supervisor.follow()
        kinds = [event.kind for event in supervisor.unwritten]
    told = warnings_of(views)
    assert "the disk is full: training continues, and events are written when that works again" in told
    assert told[-1] == f"the ledger lacks {len(kinds) - 1:,} events, which could not be written"
    assert kinds[0] == "run-started"
    assert "run-ended" in kinds


def test_a_request_of_another_process_ends_a_run_as_ctrl_c_does(tmp_path: Path) -> None:
    with (
        Ledger.create(tmp_path / "ledger.sqlite", run="r", cluster=CLUSTER) as ledger,
        closing(Hub(MACHINES, RunSpec(run="r", script="x.py"), token="t" * 32).start()) as hub,
    ):
        supervisor = Supervisor(
            CLUSTER, backend=Idle(), hub=hub, ledger=ledger, faults=Faults(iter(()), []), stop_requested=lambda: True
        )
        assert supervisor.follow().outcome == "interrupted"
