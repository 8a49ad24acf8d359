"""Machines played by process trees: they vanish whole, at once, and for the reason that is told."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from deepvm.errors import UsageError
from deepvm.runtime.backends.local.backend import LocalBackend
from deepvm.runtime.cluster import Machine
from deepvm.runtime.notices.files import FileNotices
from tests.support import ROOT
from tests.support.runtime.machines import NASTY, as_tuples, changes, job, machine, marked, python, runs
from tests.support.runtime.stubborn_tree import EXPECTED
from tests.support.waiting import wait_until

WORKER = machine("worker/1")
STAYS = "import time; time.sleep(600)"
Start = Callable[[Callable[[Machine], Sequence[str]]], LocalBackend]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    made: list[LocalBackend] = []

    def begin(command: Callable[[Machine], Sequence[str]]) -> LocalBackend:
        made.append(LocalBackend(job(tmp_path, env={"GREETING": "hello"}), command=command))
        made[-1].up([WORKER])
        return made[-1]

    yield begin
    for backend in made:
        backend.down(within_s=0)
        assert marked(backend.spec) == []


def log_of(backend: LocalBackend) -> str:
    return (backend.folder_of("worker/1") / "log.txt").read_text(encoding="utf-8")


def printed(backend: LocalBackend, what: str) -> None:
    wait_until(lambda: what in log_of(backend), f"{what!r} in the log")


# --- what a machine is given --------------------------------------------------------------------------------------


def test_a_machine_gets_the_hubs_address_its_name_and_its_notice_file(tmp_path: Path) -> None:
    backend = LocalBackend(job(tmp_path))
    folder = tmp_path / "machines" / "worker-1"
    assert backend.machine_command(WORKER) == [
        sys.executable, "-m", "deepvm.runtime.agent", "--hub", "127.0.0.1:7000", "--name", "worker/1",
        "--token-file", str(tmp_path / "token"), "--folder", str(folder), "--address", "127.0.0.1",
        "--notices", f"file:{folder / 'notice.json'}",
    ]  # fmt: skip
    assert backend.hub_address == "127.0.0.1"


def test_its_output_is_in_a_log_of_its_own_that_others_cannot_read(start: Start) -> None:
    code = "import os, sys; print(os.environ['GREETING'], flush=True); print('warned', file=sys.stderr)"
    backend = start(python(code))
    assert as_tuples(changes(backend, 2)) == [("worker/1", "up", "", None), ("worker/1", "down", "ended", 0)]
    backend.up([WORKER])
    changes(backend, 2)
    assert log_of(backend) == "hello\nwarned\n" * 2
    folder = backend.folder_of("worker/1")
    assert stat.S_IMODE((folder / "log.txt").stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_it_begins_as_if_a_shell_had_started_it(start: Start) -> None:
    code = """
    import json, os, signal
    ignored = [n.name for n in signal.Signals if signal.getsignal(n) == signal.SIG_IGN]
    files = [f for f in os.listdir("/proc/self/fd") if int(f) > 2]
    print(json.dumps([ignored, len(files), os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()]), flush=True)
    """
    backend = start(python(textwrap.dedent(code)))
    changes(backend, 2)
    ignored, files, own_session, own_group = json.loads(log_of(backend))
    inherited = {n.name for n in signal.Signals if signal.getsignal(n) == signal.SIG_IGN}  # nohup's, for one
    assert set(ignored) <= {"SIGPIPE", "SIGXFSZ"} | inherited  # as Python itself begins
    assert files == 1  # of the listing
    assert own_session
    assert own_group


# --- why it is down -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "why", "exit_code"),
    [
        ("raise SystemExit(0)", "ended", 0),
        ("raise SystemExit(3)", "failed", 3),
        ("import os; os.kill(os.getpid(), 11)", "lost", -11),
        ("import os; os.kill(os.getpid(), 9)", "lost", -9),
    ],
)
def test_the_exit_code_tells_why_a_machine_is_down(start: Start, code: str, why: str, exit_code: int) -> None:
    backend = start(python(code))
    assert as_tuples(changes(backend, 2))[1] == ("worker/1", "down", why, exit_code)
    assert backend.poll() == []


def test_a_program_that_is_not_there_is_a_failure_that_the_log_explains(start: Start) -> None:
    backend = start(lambda _: ["/no/such/program"])
    assert as_tuples(changes(backend, 2))[1] == ("worker/1", "down", "failed", 127)
    assert "/no/such/program cannot be started: [Errno 2] No such file" in log_of(backend)


def test_a_keeper_that_is_killed_loses_its_machine_and_leaves_nothing(start: Start, tmp_path: Path) -> None:
    backend = start(lambda _: [sys.executable, "-I", "-S", NASTY, "daemon", str(tmp_path / "pids")])
    pids = wait_until(lambda: all_of("daemon", tmp_path), "the tree")
    keeper = int(Path(f"/proc/{pids[0]}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    os.kill(keeper, signal.SIGKILL)
    assert as_tuples(changes(backend, 2))[1] == ("worker/1", "down", "lost", -9)
    assert not any(map(runs, pids))


# --- the whole tree -----------------------------------------------------------------------------------------------


def all_of(kind: str, folder: Path) -> list[int]:
    """The numbers of the tree's processes once all are there."""
    try:
        pids = [int(line) for line in dict.fromkeys((folder / "pids").read_text(encoding="utf-8").splitlines())]
    except FileNotFoundError:
        return []
    return pids if len(pids) >= EXPECTED[kind] else []


@pytest.mark.parametrize("kind", EXPECTED)
def test_nothing_of_a_tree_survives_that_does_not_want_to_end(start: Start, tmp_path: Path, kind: str) -> None:
    backend = start(lambda _: [sys.executable, "-I", "-S", NASTY, kind, str(tmp_path / "pids")])
    pids = wait_until(lambda: all_of(kind, tmp_path), "the tree")
    backend.preempt("worker/1", notice_s=0)
    assert as_tuples(changes(backend, 2, timeout_s=5))[1] == ("worker/1", "down", "preempted", -9)
    assert not any(map(runs, pids))
    assert marked(backend.spec) == []


@pytest.mark.parametrize("kind", ["daemon", "nameless", "workers"])
def test_a_machine_whose_main_process_ends_is_off(start: Start, tmp_path: Path, kind: str) -> None:
    backend = start(lambda _: [sys.executable, "-I", "-S", NASTY, kind, str(tmp_path / "pids"), "leave"])
    assert as_tuples(changes(backend, 2))[1] == ("worker/1", "down", "ended", 0)
    pids = [int(line) for line in (tmp_path / "pids").read_text(encoding="utf-8").splitlines()]
    assert not any(map(runs, pids))
    assert marked(backend.spec) == []


# --- notices ------------------------------------------------------------------------------------------------------


def test_a_notice_is_there_at_once_and_the_end_at_its_time(start: Start) -> None:
    backend = start(python(STAYS))
    assert as_tuples(changes(backend, 1)) == [("worker/1", "up", "", None)]
    began = time.time()
    backend.preempt("worker/1", notice_s=0.4)
    notice = FileNotices(backend.notice_file("worker/1")).poll()
    assert notice is not None
    assert notice.action == "terminate"
    assert began + 0.4 <= notice.at_s <= time.time() + 0.4
    (gone,) = changes(backend, 1)
    assert as_tuples([gone]) == [("worker/1", "down", "preempted", -9)]
    assert gone.at_s >= began + 0.4


def test_no_notice_is_written_for_an_end_without_one(start: Start) -> None:
    backend = start(python(STAYS))
    backend.preempt("worker/1", notice_s=0)
    changes(backend, 2)
    assert not backend.notice_file("worker/1").exists()


def test_a_machine_that_frees_itself_at_its_notice_was_preempted(start: Start, tmp_path: Path) -> None:
    notice = tmp_path / "machines" / "worker-1" / "notice.json"
    code = f"import os, time\nwhile not os.path.exists({str(notice)!r}): print('none', flush=True); time.sleep(0.01)"
    backend = start(python(code))
    backend.preempt("worker/1", notice_s=60)
    assert as_tuples(changes(backend, 2))[1] == ("worker/1", "down", "preempted", 0)
    looks = log_of(backend).count("none")
    backend.up([WORKER])
    assert as_tuples(changes(backend, 1)) == [("worker/1", "up", "", None)]
    wait_until(lambda: log_of(backend).count("none") > looks + 1, "a second look: the notice was for the one before")
    assert backend.poll() == []


def test_what_is_down_cannot_be_preempted_and_a_notice_is_a_time(start: Start) -> None:
    backend = start(python(STAYS))
    with pytest.raises(UsageError, match="notice_s is -1: it must be finite and not negative"):
        backend.preempt("worker/1", notice_s=-1)
    backend.down()
    with pytest.raises(UsageError, match="worker/1 is down already"):
        backend.preempt("worker/1", notice_s=0)


# --- down ---------------------------------------------------------------------------------------------------------


def test_a_machine_is_asked_to_stop_and_may_clean_up(start: Start) -> None:
    code = """
    import os, signal, sys, time
    def clean(*_): os.write(1, b"cleaned"); sys.exit(5)
    signal.signal(signal.SIGTERM, clean); print("ready", flush=True); time.sleep(600)
    """
    backend = start(python(textwrap.dedent(code)))
    printed(backend, "ready")
    backend.down(within_s=20)
    assert as_tuples(changes(backend, 2))[1] == ("worker/1", "down", "stopped", 5)
    assert "cleaned" in log_of(backend)


def test_one_that_does_not_stop_is_ended_in_time(start: Start) -> None:
    code = """
    import os, signal, time
    signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"asked")); print("ready", flush=True)
    while True: time.sleep(600)
    """
    backend = start(python(textwrap.dedent(code)))
    printed(backend, "ready")
    backend.down(within_s=0.3)
    assert "asked" in log_of(backend)
    assert as_tuples(changes(backend, 2))[1] == ("worker/1", "down", "stopped", -9)


def test_only_those_that_are_named_go_down(start: Start) -> None:
    backend = start(python(STAYS))
    backend.up([machine("worker/2")])
    backend.down(["worker/1"], within_s=0)
    backend.up([WORKER])
    assert [(c.machine, c.state) for c in changes(backend, 4)] == [
        ("worker/1", "up"), ("worker/2", "up"), ("worker/1", "down"), ("worker/1", "up"),
    ]  # fmt: skip


# --- tied to who started it ---------------------------------------------------------------------------------------

OWNER = """
import os, sys, threading, time
from pathlib import Path
from tests.support.runtime.machines import NASTY, job, machine
from deepvm.runtime.backends.local.backend import LocalBackend

folder = Path({folder!r})
command = [sys.executable, "-I", "-S", NASTY, "workers", str(folder / "pids")]
backend = LocalBackend(job(folder), command=lambda _: command)
starter = threading.Thread(target=backend.up, args=([machine("worker/1")],))
starter.start()
while os.path.exists(f"/proc/self/task/{{starter.native_id}}"): time.sleep(0.001)
(folder / "alone").touch()
time.sleep(600)
"""


def test_machines_outlive_the_thread_that_started_them_but_not_the_process(tmp_path: Path) -> None:
    code = OWNER.format(folder=str(tmp_path))
    owner = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    try:
        pids = wait_until(lambda: all_of("workers", tmp_path), "the tree")
        wait_until((tmp_path / "alone").exists, "the end of the thread")
        assert all(map(runs, pids))
    finally:
        owner.kill()
        owner.wait(20)
    wait_until(lambda: not any(map(runs, pids)), "the end of the machine")


def test_a_child_of_the_owner_does_not_keep_its_machines_alive(tmp_path: Path) -> None:
    fork = "import os\nif os.fork() == 0: (folder / 'forked').touch(); time.sleep(20); os._exit(0)\ntime.sleep(600)"
    code = OWNER.format(folder=str(tmp_path)).replace("time.sleep(600)", fork)
    owner = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, start_new_session=True)
    try:
        pids = wait_until(lambda: all_of("workers", tmp_path), "the tree")
        wait_until((tmp_path / "forked").exists, "the fork")
        owner.kill()
        owner.wait(20)
        wait_until(lambda: not any(map(runs, pids)), "the end of the machine", timeout_s=10)
    finally:
        os.killpg(owner.pid, signal.SIGKILL)
