"""Supervisors of a cloud's machines, with a backend that only records its calls."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from deepvm.errors import UsageError
from deepvm.runtime.backends.base import Change
from deepvm.runtime.cluster import Cluster, Machine, hub_of
from deepvm.runtime.ledger.ledger import Ledger
from deepvm.runtime.supervise import cloud_supervisor
from deepvm.runtime.supervise.cloud_supervisor import CloudSupervisor
from deepvm.runtime.supervise.replan import Replanned, Replanner
from tests.support.runtime.machines import machine


class Recorder:
    def __init__(self) -> None:
        self.requested: list[str] = []

    def up(self, machines: Sequence[Machine]) -> None:
        self.requested += [each.name for each in machines]

    def poll(self) -> Sequence[Change]:
        return ()

    def preempt(self, name: str, *, notice_s: float) -> None: ...

    def down(self, names: Sequence[str] | None = None, *, within_s: float = 10.0) -> None: ...


def cluster_of(*machines: Machine) -> Cluster:
    return Cluster(machines=machines, architecture="tiering", catalog="c", checkpoint_bytes=None, restore_s=None)


def test_the_machine_with_the_hub_is_requested_first(tmp_path: Path) -> None:
    # By role alone, anchor/0 would be first; clouds refuse machines before the one with the hub.
    cluster = cluster_of(machine("worker/0"), machine("memory/0", "on-demand"), machine("anchor/0", "on-demand"))
    backend = Recorder()
    with Ledger.create(tmp_path / "ledger.sqlite", run="r1", cluster=cluster) as ledger:
        CloudSupervisor(cluster, backend, ledger, show=lambda _: None, ended=lambda: False).begin()
        assert [event.machine for event in ledger.events("machine-asked")] == backend.requested
    assert backend.requested == ["memory/0", "anchor/0", "worker/0"]
    assert hub_of(cluster).name == "memory/0"


def test_the_hub_prefers_an_on_demand_machine_that_keeps_checkpoints() -> None:
    worker, anchor = machine("worker/0", "on-demand"), machine("anchor/0", "on-demand")
    assert hub_of(cluster_of(worker, anchor)) == anchor
    assert hub_of(cluster_of(worker, machine("anchor/0"))) == worker
    with pytest.raises(UsageError, match="spot machines only, and the hub needs an on-demand one"):
        hub_of(cluster_of(machine("worker/0"), machine("memory/0")))


class Better(Replanner):
    """A replanner that finds the same better plan at each look."""

    def better(self, cluster: Cluster) -> Replanned | None:
        return cluster, ("the gang of 1 moves", "it saves $0.12/h")


def test_what_has_become_better_in_a_cloud_is_reported_once_and_left_to_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cloud_supervisor, "POLL_S", 0.0)
    monkeypatch.setattr(cloud_supervisor, "ADVISE_S", 0.0)
    cluster = cluster_of(machine("worker/0"), machine("memory/0", "on-demand"))
    backend, shown, looks = Recorder(), list[str](), iter(range(4))
    with Ledger.create(tmp_path / "ledger.sqlite", run="r1", cluster=cluster) as ledger:
        ended = lambda: next(looks, None) is None  # noqa: E731
        CloudSupervisor(cluster, backend, ledger, show=shown.append, ended=ended, replanner=Better()).follow()
        (warning,) = ledger.events("warning")
    assert shown == [warning.data["text"]]
    assert "another plan is better now: the gang of 1 moves; it saves $0.12/h" in shown[0]
    assert backend.requested == []
