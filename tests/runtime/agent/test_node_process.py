"""The memory node of a machine, which is killed alone."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepvm.runtime.agent import node_process
from deepvm.runtime.agent.node_process import NodeProcess
from deepvm.store import open_store
from tests.support.small_disk import fill
from tests.support.store.checkpoints import payload, save
from tests.support.waiting import wait_until

BLOCK = 2**16
DATA = payload(BLOCK)


class Machine:
    """Records what its memory node reports."""

    def __init__(self, folder: Path) -> None:
        self.addresses: list[str] = []
        self.reports: list[str] = []
        self.failures: list[str] = []
        options = ["--capacity", "8MiB", "--block", str(BLOCK)]
        self.node = NodeProcess(
            folder, "127.0.0.1", options, name="memory/0",
            listens=self.addresses.append, report=self.reports.append, failed=self.failures.append,
        )  # fmt: skip

    def kill(self) -> None:
        assert self.node._process is not None
        os.kill(self.node._process.pid, signal.SIGKILL)

    def kill_and_wait(self) -> None:
        starts = len(self.addresses)
        self.kill()
        wait_until(lambda: len(self.addresses) > starts, "the restart")


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    found = Machine(tmp_path)
    with found.node:
        yield found


def test_a_memory_node_that_is_killed_is_started_again_at_its_address_with_what_it_had_spilled(
    machine: Machine, tmp_path: Path
) -> None:
    with contextlib.closing(open_store(f"memory://{machine.addresses[0]}", key="key")) as store:
        save(store, DATA, chunk_bytes=BLOCK)
        wait_until(lambda: list((tmp_path / "spill").rglob("step-*.json")), "the spilled checkpoint")
        machine.kill_and_wait()
        assert machine.addresses[0] == machine.addresses[1]
        assert "ended by SIGKILL" in machine.reports[0]
        assert store.steps("run-a") == [1]
        assert not machine.failures
        save(store, payload(BLOCK, seed=1), step=2, chunk_bytes=BLOCK)
        assert store.steps("run-a") == [1, 2]


def test_a_memory_node_that_is_killed_again_and_again_fails_its_machine(machine: Machine) -> None:
    for _ in range(node_process.MOST_ENDS - 1):
        machine.kill_and_wait()
    machine.kill()
    wait_until(lambda: machine.failures, "the failure")
    assert "given up" in machine.failures[0]
    assert len(machine.reports) == node_process.MOST_ENDS - 1


def test_a_memory_node_whose_port_is_taken_listens_elsewhere(machine: Machine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        machine.node._address = address = f"127.0.0.1:{taken.getsockname()[1]}"
        machine.kill_and_wait()
    assert machine.addresses[1] != address


def test_a_memory_node_that_is_killed_while_the_disk_is_full_is_started_again(
    small_disk: Path,
) -> None:
    machine = Machine(small_disk)
    with machine.node:
        for path in small_disk.iterdir():  # a file that is replaced would give its room to the new one
            if path.is_file():
                path.unlink()
        fill(small_disk)
        for _ in range(node_process.MOST_ENDS - 1):
            machine.kill_and_wait()
        assert not machine.failures
        assert machine.addresses == machine.addresses[:1] * node_process.MOST_ENDS
