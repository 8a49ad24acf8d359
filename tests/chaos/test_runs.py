"""Whole runs, broken on purpose for longer: they finish, with the weights of a run that nobody touched."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from deepvm.runtime.backends.base import NoCapacity
from deepvm.runtime.backends.local.backend import LocalBackend
from deepvm.runtime.cluster import Machine, load_cluster
from deepvm.runtime.ledger.ledger import Ledger
from deepvm.runtime.run_spec import RunSpec
from deepvm.runtime.supervise import local_run
from tests.support.runtime.machines import runs
from tests.support.runtime.whole_runs import (
    TOY,
    Running,
    check_repeats,
    check_samples,
    finished,
    running,
    undisturbed,
    weights,
    words_for,
    write_plan,
)

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]


def pids_of(run: Running, *words: str) -> list[int]:
    """Processes of a run whose command line has all these words."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
                mine = f"DEEPVM_TEST_MARK={run.mark}".encode() in Path(f"/proc/{name}/environ").read_bytes()
                if mine and all(word.encode() in line for word in words):
                    found.append(int(name))
    return found


def test_three_preemptions_and_the_loss_of_all_leave_the_weights_bit_for_bit(tmp_path: Path) -> None:
    faults = (
        "at:step:50:worker/1:notice=2s,at:step:110:worker/0:notice=0s,"
        "at:step:170:worker/0+worker/1:notice=2s,at:step:230:worker/*:notice=0s"
    )
    run = finished(tmp_path, "run", 300, options=["--preempt", faults])
    assert weights(tmp_path, "run") == undisturbed(tmp_path, 300)
    check_repeats(run.events())
    check_samples(tmp_path, "run", 300, per_epoch=12, samples=96)
    lost = [event.machine for event in run.events("machine-down") if event.data["why"] == "preempted"]
    assert sorted(lost) == ["worker/0"] * 3 + ["worker/1"] * 3
    assert {event.data["world_size"] for event in run.events("step")} == {2}
    choices = [event.data["choice"] for event in run.events("decision")]
    assert len(choices) == 3
    assert set(choices) <= {"save", "rely"}  # on a busy machine 2 s may be too little for a save


def test_a_run_that_is_interrupted_twice_or_killed_continues_where_it_was(tmp_path: Path) -> None:
    words = words_for(tmp_path, "run", 90, "--step-s", "0.05")
    with running(tmp_path, words, name="run") as run:
        run.until_step(22)
        (node,) = pids_of(run, "memory-node")
        os.kill(node, signal.SIGSTOP)  # its machine waits for it to write on what it has
        run.interrupt()
        run.until(lambda: not pids_of(run, "--name", "worker/0"), "the end of a worker")
        assert run.process.poll() is None
        run.interrupt()
        code, _, err = run.end(20)  # its machine would wait for a minute
    assert code == 130
    assert "deepvm run --resume run" in err
    with running(tmp_path, ["--resume", "run"], name="run") as run:
        run.until_step(45)
        run.process.kill()
        run.end(20)
    with running(tmp_path, ["--resume", "run", "--json"], name="run") as run:
        code, out, err = run.end()
    assert code == 0, err
    assert json.loads(out)["sessions"] == 3
    assert weights(tmp_path, "run") == undisturbed(tmp_path, 90)
    check_repeats(run.events())


def test_survivors_continue_smaller_and_grow_again(tmp_path: Path) -> None:
    options = ["--after-loss", "shrink", "--preempt", "at:step:30:worker/0:notice=0s"]
    run = finished(tmp_path, "run", 240, "--step-s", "0.08", options=options)
    sizes = [event.data["world_size"] for event in run.events("step")]
    changes = [size for size, before in zip(sizes, [0, *sizes], strict=False) if size != before]
    assert changes == [2, 1, 2]
    assert sizes.count(1) > 5, "it trained while the replacement was still starting"
    assert [event.data["machines"] for event in run.events("group")] == [
        ["worker/0", "worker/1"], ["worker/1"], ["worker/0", "worker/1"]
    ]  # fmt: skip
    check_repeats(run.events())
    check_samples(tmp_path, "run", 240, per_epoch=12, samples=96)


def test_a_memory_node_that_is_killed_comes_back_with_what_it_had(tmp_path: Path) -> None:
    words = words_for(tmp_path, "run", 240, "--step-s", "0.05")
    with running(tmp_path, words, name="run") as run:
        run.until_step(35)
        killed = [*pids_of(run, "--name", "memory/0"), *pids_of(run, "memory-node")]
        assert len(killed) == 3, "a keeper, the machine, its node"
        for pid in killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        code, _, err = run.end()
    assert code == 0, err
    assert not any(map(runs, killed))
    assert [event.machine for event in run.events("machine-down") if event.data["why"] == "lost"] == ["memory/0"]
    assert len(run.events("group")) == 2, "the trainers were told its new address"
    places = [event.data["place"] for event in run.events("save") if event.data["state"] == "remote"]
    assert len(set(places)) == 2
    assert weights(tmp_path, "run") == undisturbed(tmp_path, 240)


def test_a_machine_that_hangs_is_given_up_and_replaced(tmp_path: Path) -> None:
    words = words_for(tmp_path, "run", 60, "--step-s", "0.05")
    with running(tmp_path, words, name="run") as run:
        run.until_step(25)
        machine = next(pid for pid in pids_of(run, "--name", "worker/1") if not is_keeper(pid))
        frozen = [pid for pid in pids_of(run) if writes_where(pid) == writes_where(machine) and not is_keeper(pid)]
        assert len(frozen) >= 2, "its machine and its trainer"
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        code, _, err = run.end()
    assert code == 0, err
    first = run.events("machine-down")[0]
    assert (first.machine, first.data["why"]) == ("worker/1", "lost")
    assert weights(tmp_path, "run") == undisturbed(tmp_path, 60)
    check_repeats(run.events())


def is_keeper(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"subreaper.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def writes_where(pid: int) -> str:
    """The standard output of a process; the processes of a machine have one pipe, which its keeper reads."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/fd/1")
    return f"{pid} is gone"


class Bare(LocalBackend):
    """A market that has no more of a type, once one of it was lost; ``gone`` are all that it has none of."""

    gone: tuple[str, ...] = ()
    asked: list[tuple[float, str]]

    def up(self, machines: Sequence[Machine]) -> None:
        for machine in machines:
            if not hasattr(self, "asked"):
                self.asked = []
            again = machine.name in self._machines
            self.asked.append((time.monotonic(), machine.instance))
            if again and machine.instance in self.gone:
                if len([1 for _, instance in self.asked if instance == machine.instance]) > 4:
                    super().up([machine])  # it has them again
                    return
                raise NoCapacity(machine, "sold out")
        super().up(machines)


@pytest.mark.parametrize("gone", [("g4dn.xlarge",), ("g4dn.xlarge", "g5.xlarge", "g3s.xlarge")])
def test_where_the_market_has_none_another_type_is_taken_or_it_is_asked_again(
    gone: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPVM_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(local_run, "LocalBackend", type("Market", (Bare,), {"gone": gone}))
    (tmp_path / "out").mkdir()
    cluster = load_cluster(write_plan(tmp_path))
    settings = RunSpec(
        script=TOY, args=("60", str(tmp_path / "out")), policy="every 10 steps", workers=2, memory_bytes=64_000_000,
        preempt="at:step:25:worker/1:notice=0s",
    )  # fmt: skip
    ended = local_run.run_local(cluster, settings, name="run")
    assert ended.outcome.outcome == "finished"
    with Ledger.open(ended.folder / "ledger.sqlite") as ledger:
        events = list(ledger.events())
    check_repeats(events)
    replanned = [event for event in events if event.kind == "replanned"]
    up = [event for event in events if event.kind == "machine-up" and event.machine == "worker/1"]
    refused = [(event.data["instance"], event.data["why"]) for event in events if event.kind == "machine-refused"]
    assert refused[0][0] == "g4dn.xlarge"
    assert "sold out" in refused[0][1]
    if len(gone) == 1:
        said = " ".join(replanned[0].data["changes"])
        assert "g5.xlarge" in said
        assert "sold out" in said
        assert up[-1].data["instance"] == "g5.xlarge"
        assert up[-1].data["usd_per_hour"] == pytest.approx(0.3018)
    else:
        assert {instance for instance, _ in refused} >= {"g4dn.xlarge", "g5.xlarge"}
        down = next(e for e in events if e.kind == "machine-down" and e.machine == "worker/1")
        assert up[-1].at_s - down.at_s > 5, "it was asked for again, later"
