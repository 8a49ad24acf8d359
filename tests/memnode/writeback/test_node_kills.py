"""A node that is killed at any moment loses nothing that it called spilled, shows nothing that was not saved, and
leaves nothing on the disk that no checkpoint owns."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from deepvm.errors import StoreError
from tests.support import ROOT
from tests.support.memnode.client import BLOCK, Client, content

SIZE = 24 * BLOCK
NEW = 8 * BLOCK  # of each save; the rest is as it was, and stays where it is in a file that is written over


@contextmanager
def forks() -> Iterator[subprocess.Popen[str]]:
    script = ROOT / "tests" / "support" / "memnode" / "node_forks.py"
    with subprocess.Popen(
        [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(20)


class Writer:
    """Saves until its node is gone, and remembers what it was told. Every ``again`` saves have the same step."""

    def __init__(self, run: str, again: int) -> None:
        self.run, self.again = run, again
        self.saves = 0
        self.saved: dict[int, int] = {}  # step -> the newest save of it that this node called committed
        self.spilled: dict[int, int] = {}  # and that was called spilled
        self.began = threading.Event()

    def data(self, save: int) -> bytes:
        return content(save, NEW) + content(-save % 4, SIZE - NEW)

    def write(self, address: str, session: str) -> None:
        self.saved.clear()  # what was committed and not spilled may be gone with the last node
        with suppress(StoreError, OSError), Client(address, self.run, session=session, timeout_s=20) as client:
            while True:
                self.saves += 1
                step = self.saves // self.again
                self.began.set()
                client.save(step, self.data(self.saves))
                self.saved[step] = self.saves
                shown = client.steps()
                self.spilled |= {s: self.saved[s] for s in shown.keys() & self.saved if shown[s] == "spilled"}
        self.began.set()

    def check(self, address: str) -> dict[int, str]:
        """What the node shows was saved, bit for bit, and is no older than what was called spilled."""
        with Client(address, self.run, write=False) as client:
            shown = client.steps()
            assert max(shown, default=0) >= max(self.spilled, default=0), (shown, self.spilled)
            for step in shown:
                found = client.read(step)
                versions = [
                    save for save in range(step * self.again, (step + 1) * self.again) if self.data(save) == found
                ]
                assert versions, f"step {step} of {self.run} is none of what was saved"
                assert max(versions) >= self.spilled.get(step, 0), f"step {step} of {self.run} is an older one"
        return shown


def owned(spill: Path, shown: dict[str, dict[int, str]]) -> set[Path]:
    """The files that the checkpoints have which the node shows."""
    found = {spill / ".node.lock"} | {spill / run / "run.json" for run in shown if (spill / run).exists()}
    for run, steps in shown.items():
        found |= {spill / run / f"step-{step:012d}{end}" for step in steps for end in (".json", ".safetensors")}
    return found


def kill_often(spill: Path, kills: int) -> list[Writer]:
    chance = random.Random(16)
    writers = [Writer("once", 1), Writer("again", 3)]
    with forks() as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for number in range(kills + 1):
            print(spill, file=process.stdin, flush=True)
            pid, address = process.stdout.readline().split()
            try:
                shown = {writer.run: writer.check(address) for writer in writers}
                left = {path for path in spill.rglob("*") if path.is_file()}
                assert left == owned(spill, shown), f"after kill {number}"
                if number == kills:
                    break
                threads = []
                for writer in writers:
                    writer.began.clear()
                    thread = threading.Thread(target=writer.write, args=(address, f"s{number}"), daemon=True)
                    thread.start()
                    threads.append(thread)
                for writer in writers:
                    assert writer.began.wait(20)
                threading.Event().wait(chance.random() * 0.25)  # any moment of some saves
            finally:
                os.kill(int(pid), signal.SIGKILL)
            assert process.stdout.readline() == "ended\n"
            for thread in threads:
                thread.join(20)
                assert not thread.is_alive()
    return writers


def test_a_node_killed_under_two_writers_loses_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    writers = kill_often(tmp_path, kills=8)
    assert all(writer.saves >= 8 for writer in writers)


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_three_hundred_kills_under_two_writers_lose_nothing_and_leave_nothing(tmp_path: Path) -> None:
    writers = kill_often(tmp_path, kills=300)
    assert all(writer.spilled for writer in writers)
