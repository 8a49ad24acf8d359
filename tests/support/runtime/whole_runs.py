"""What tests of ``deepvm run`` share: a plan, whole runs as processes, and a look at what happened in them."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepvm.catalog import library
from deepvm.events import Event
from deepvm.plan import Request, plan
from deepvm.runtime.agent.prefetch import segment_of
from deepvm.runtime.ledger.ledger import Ledger
from tests.support.runtime.machines import MARK
from tests.support.waiting import wait_until

TOY = str(Path(__file__).with_name("toy_training.py"))
RUN_S = 100.0  # a run that takes longer hangs


def write_plan(folder: Path) -> Path:
    path = folder / "plan.json"
    found = plan(library.load("paper-aws-2023"), Request(budget_usd=3.0))
    path.write_text(json.dumps(found.to_json()), encoding="utf-8")
    return path


@dataclass
class Running:
    """A ``deepvm run`` in a process of its own; ``name`` is the run's."""

    process: subprocess.Popen[str]
    folder: Path
    name: str
    mark: str

    @property
    def ledger(self) -> Path:
        return self.folder / "runs" / self.name / "ledger.sqlite"

    def events(self, *kinds: str) -> list[Event]:
        if not self.ledger.exists():
            return []
        with contextlib.suppress(Exception), Ledger.open(self.ledger) as ledger:  # it is being made
            return [event for event in ledger.events() if not kinds or event.kind in kinds]
        return []

    def step(self) -> int:
        """The last one that was told."""
        return max((event.data["step"] for event in self.events("step")), default=0)

    def until_step(self, step: int) -> None:
        self.until(lambda: self.step() >= step, f"step {step}")

    def until(self, ready: Callable[[], Any], what: str) -> None:
        def happened() -> Any:
            assert self.process.poll() is None, f"it ended before {what}: {self.process.communicate()}"
            return ready()

        wait_until(happened, what, timeout_s=RUN_S, every_s=0.05)

    def interrupt(self) -> float:
        """Ctrl-C; when it was."""
        self.process.send_signal(signal.SIGINT)
        return time.monotonic()

    def end(self, timeout_s: float = RUN_S) -> tuple[int, str, str]:
        """Its exit code, stdout and stderr; nothing of it is left."""
        out, err = self.process.communicate(timeout=timeout_s)
        wait_until(lambda: not self.left(), "the end of all processes", timeout_s=10.0)
        for machine in (self.ledger.parent / "machines").iterdir():
            assert not segment_of(machine).exists(), f"{machine.name} left a segment behind"
        return self.process.returncode, out, err

    def left(self) -> list[str]:
        """Command lines of processes that came of it and still run."""
        wanted, found = f"{MARK}={self.mark}".encode(), []
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != self.process.pid:
                with contextlib.suppress(OSError):
                    if wanted in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                        found.append(Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode())
        return found


@contextlib.contextmanager
def running(folder: Path, words: Sequence[str], *, name: str, **more: Any) -> Iterator[Running]:
    """``deepvm run`` with these words, its runs in ``folder/runs``."""
    mark = secrets.token_hex(8)
    env = {**os.environ, "DEEPVM_RUNS": str(folder / "runs"), MARK: mark, "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    env |= more.pop("env_more", {})
    process = subprocess.Popen(
        [sys.executable, "-m", "deepvm", "run", *words], env=env, text=True,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": folder, **more},
    )  # fmt: skip
    found = Running(process, folder, name, mark)
    try:
        yield found
    finally:
        process.kill()
        with contextlib.suppress(ValueError):  # it was read to its end
            process.communicate(timeout=10)
        wait_until(lambda: not found.left(), "the end of all processes", timeout_s=10.0)


def words_for(
    folder: Path, name: str, steps: int, *toy: str, options: Sequence[str] = (), workers: int = 2
) -> list[str]:
    """A run of the toy, saving every ten steps."""
    (folder / name).mkdir()
    plan_file = folder / "plan.json"
    if not plan_file.exists():
        write_plan(folder)
    save = [] if "--save" in options else ["--save", "every 10 steps or at notice"]
    return [
        str(plan_file), "--name", name, "--workers", str(workers), "--memory", "64MB", *save, *options,
        "--", TOY, str(steps), str(folder / name), *toy,
    ]  # fmt: skip


def finished(folder: Path, name: str, steps: int, *toy: str, options: Sequence[str] = ()) -> Running:
    """A run that came to its end by itself."""
    with running(folder, words_for(folder, name, steps, *toy, options=options), name=name) as run:
        code, out, err = run.end()
        assert code == 0, err
        assert "finished" in out
        return run


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def undisturbed(folder: Path, steps: int) -> str:
    """The weights of two ranks that train without deepvm run."""
    out = folder / f"undisturbed-{steps}"
    out.mkdir()
    port = free_port()
    env = {
        **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1",
        "DEEPVM_STORE": f"file://{out}/store", "DEEPVM_POLICY": "every 1000 steps",
    }  # fmt: skip
    command = [sys.executable, TOY, str(steps), str(out), "--step-s", "0"]
    ranks = [subprocess.Popen(command, env={**env, "RANK": str(rank)}) for rank in range(2)]
    try:
        assert [rank.wait(RUN_S) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(10)
    return (out / "weights").read_text(encoding="utf-8")


def weights(folder: Path, name: str) -> str:
    return (folder / name / "weights").read_text(encoding="utf-8")


def check_repeats(events: Sequence[Event]) -> int:
    """Nothing was repeated but steps since the newest committed checkpoint; how many were."""
    committed, last, repeated = 0, 0, 0
    for event in sorted(events, key=lambda event: event.at_s):
        if event.kind == "save" and event.data["state"] == "remote":
            committed = max(committed, event.data["step"])
        elif event.kind == "restored":
            assert event.data["step"] >= committed, f"{event} is older than {committed}, which was committed before"
        elif event.kind == "step":
            step = event.data["step"]
            if step <= last:
                repeated += 1
                assert step > committed, f"step {step} was repeated, and {committed} was committed before"
            else:
                assert step == last + 1, f"step {step} follows {last}"
            last = step if step > last else last
    return repeated


def check_samples(folder: Path, name: str, steps: int, per_epoch: int, samples: int) -> None:
    """Every sample was seen once in each epoch, by the last that made each step."""
    by_step: dict[int, dict[str, list[int]]] = {}
    for line in (folder / name / "samples").read_text(encoding="utf-8").splitlines():
        step, _, port, *numbers = line.split()
        groups = by_step.setdefault(int(step), {})
        found = groups.pop(port, [])
        groups[port] = found + [int(number) for number in numbers]  # the last of them is the last group's
    assert sorted(by_step) == list(range(1, steps + 1))
    for first in range(1, steps + 1, per_epoch):
        seen = [
            number
            for step in range(first, min(first + per_epoch, steps + 1))
            for number in list(by_step[step].values())[-1]
        ]
        whole = first + per_epoch <= steps + 1
        assert len(seen) == len(set(seen)), f"samples were seen twice from step {first} on"
        assert not whole or sorted(seen) == list(range(samples))
