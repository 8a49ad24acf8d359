"""What scripts print: progress bars, floods and full disks, in the log and in the display."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from deepvm.cli.run.display import MOST_LINES, Display, Output, plain
from deepvm.events import Event
from deepvm.runtime import Template
from deepvm.runtime.backends.local.process_tree import ProcessTree
from deepvm.runtime.cluster import Machine
from deepvm.runtime.log_tail import Tail, as_shown, tail_text
from deepvm.runtime.supervise.run_state import MachineView, View
from deepvm.runtime.workers.forked_worker import run_script
from tests.support.waiting import wait_until

BAR = """
import sys, time
print("begin", flush=True)
for i in range({updates}):
    sys.stderr.write(f"\\r{{i}}/{updates} |{{'#' * 40}}|")
    time.sleep({pause_s})
sys.stderr.write("\\n")
print("end", flush=True)
"""


def ran(code: str, log: Path) -> int:
    tree = ProcessTree([sys.executable, "-c", code], env=dict(os.environ), log=log)
    return tree.wait(timeout_s=60)


def test_a_command_inherits_nothing_but_its_streams_also_in_a_network_of_its_own(tmp_path: Path) -> None:
    code = "import os; print([fd for fd in range(1000) if os.path.exists(f'/proc/self/fd/{fd}')])"
    for namespace in [None, *([Path("/proc/self/ns/net")] if os.geteuid() == 0 else [])]:
        log = tmp_path / "log"
        command = [sys.executable, "-I", "-S", "-c", code]
        tree = ProcessTree(command, env=dict(os.environ), log=log, namespace=namespace)
        assert tree.wait(timeout_s=60) == 0
        assert log.read_text() == "[0, 1, 2]\n"
        log.unlink()


def test_a_line_is_what_a_terminal_would_leave_of_it() -> None:
    shown = [as_shown(line) for line in ("plain", "\r1%\r2%", "text\r", "10%\r20%\r", "crlf\r", "", "\r\r")]
    assert shown == ["plain", "2%", "text", "20%", "crlf", "", ""]


def test_a_progress_bar_is_followed_while_it_moves_and_its_last_state_is_a_line(tmp_path: Path) -> None:
    lines: list[str] = []
    updates: list[str] = []
    log = tmp_path / "log.txt"
    tail = Tail(log, lines.extend, on_update=updates.append).start()
    with log.open("w", encoding="utf-8", newline="") as file:
        for percent in (1, 2, 3):
            file.write(f"\r{percent}%")
            file.flush()
            wait_until(lambda wanted=f"{percent}%": wanted in updates, "the update")
        assert lines == []
        file.write("\r100%\nnext\n")
    wait_until(lambda: lines == ["100%", "next"], "the lines")
    tail.close()
    assert updates == ["1%", "2%", "3%"]


def test_a_line_without_an_end_does_not_grow_in_memory(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_bytes(b"x" * 5_000_000 + b"\r" + b"y" * 3_000_000)
    tail = Tail(log, lambda _: None)
    tail.drain()
    assert len(tail._lines.rest) <= 2**20
    log.write_bytes(b"ValueError: no\n" + b"".join(b"\r%d%%" % i for i in range(100_000)))
    assert tail_text(log, most_bytes=100) == "ValueError: no\n99999%"


def test_of_a_progress_bar_the_log_keeps_a_state_a_second_and_the_last(tmp_path: Path) -> None:
    assert ran(BAR.format(updates=300, pause_s=0.002), tmp_path / "log") == 0
    text = (tmp_path / "log").read_bytes()
    assert text.startswith(b"begin\n")
    assert text.endswith(b"|\nend\n")
    assert b"\r299/300" in text
    assert text.count(b"\r") < 30, "300 updates in less than a second"


def test_a_worker_prints_line_by_line(tmp_path: Path) -> None:
    script, log = tmp_path / "slow.py", tmp_path / "log"
    script.write_text("import time\nprint('a line')\ntime.sleep(600)\n", encoding="utf-8")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with Template(preload=["json"], env=env) as template, log.open("wb") as file:
        worker = template.start(run_script, [str(script), [], False], env=env, stdout=file.fileno())
        wait_until(lambda: log.read_bytes() == b"a line\n", "the line")
        worker.kill()


def test_output_before_a_crash_is_all_there(tmp_path: Path) -> None:
    code = "import os\nfor i in range(20000): print('line', i)\nprint('last', end='', flush=True); os.abort()"
    assert ran(code, tmp_path / "log") == -6
    text = (tmp_path / "log").read_text(encoding="utf-8")
    assert text.endswith("line 19999\nlast")
    assert text.count("\n") == 20000


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(path)], capture_output=True).returncode:
        pytest.skip("a small disk needs root")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_full_disk_costs_output_and_not_the_process_that_prints(small_disk: Path) -> None:
    log, full, go = small_disk / "log", small_disk / "full", small_disk.parent / "go"
    code = f"""
import os, time
print("begin", flush=True)
while not os.path.exists({str(go)!r}): print("x" * 1000, flush=True); time.sleep(0.001)
print("end", flush=True)
"""
    full.write_bytes(b"0" * 200_000)
    tree = ProcessTree([sys.executable, "-c", code], env=dict(os.environ), log=log)
    wait_until(lambda: os.statvfs(small_disk).f_bavail == 0, "a full disk")
    with pytest.raises(TimeoutError):
        tree.wait(timeout_s=0.5)
    full.unlink()
    go.touch()
    assert tree.wait(timeout_s=30) == 0
    text = log.read_text(encoding="utf-8")
    assert "bytes of output are lost: No space left on device" in text
    assert text.endswith("end\n")


def view(*news: Event) -> View:
    machine = Machine(
        name="worker/0", role="worker", instance="g", market="spot", usd_per_hour=0.1, on_demand_usd_per_hour=0.3
    )
    return View(machines=[MachineView(machine)], news=news)


def test_a_flood_of_lines_is_cut_and_the_rest_is_counted(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.touch()
    console = Console(file=io.StringIO(), width=100)
    output = Output(console, log).start()
    with log.open("w", encoding="utf-8") as file:
        file.writelines(f"line {i}\n" for i in range(100_000))
    output.close()
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert MOST_LINES <= shown.count("line ") < 20 * MOST_LINES
    assert "lines are not shown; all are in" in shown


def test_a_first_failure_is_shown_at_once_with_its_traceback(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=100)
    display = Display(console, log_of=lambda _: tmp_path / "log.txt").start()
    error = 'Traceback (most recent call last):\n  File "train.py", line 3\nValueError: \x1b[2Jno [bold]'
    failed = Event(
        at_s=1,
        kind="worker-failed",
        machine="worker/0",
        data={"error": error, "line": "ValueError: no", "final": False},
    )
    display(view(failed))
    display.close()
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "the script failed on worker/0 (ValueError: no): it is restarted" in shown
    assert 'File "train.py", line 3' in shown
    assert "ValueError: no [bold]" in shown
    assert "\x1b" not in shown


def test_what_the_script_printed_before_it_failed_is_shown_once_and_its_exit_code(tmp_path: Path) -> None:
    console, log = Console(file=io.StringIO(), width=100), tmp_path / "log.txt"
    display = Display(console, log_of=lambda _: log).start()
    display(view(Event(at_s=1, kind="group", data={"round": 1, "machines": ["worker/0"]})))
    log.write_text("only this\n", encoding="utf-8")
    told = {"error": "only this", "line": "exit code 3", "final": False}
    display(view(Event(at_s=1, kind="worker-failed", machine="worker/0", data=told)))
    display.close()
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "the script failed on worker/0 (exit code 3): it is restarted" in shown
    assert shown.count("only this") == 1


@pytest.mark.parametrize(
    ("text", "shown"),
    [("\x1b[31mred\x1b[0m", "red"), ("\x1b]0;title\x07x", "x"), ("a\x08b\tc", "a\\x08b     c"), ("ü█", "ü█")],
)
def test_what_moves_a_terminal_is_not_shown(text: str, shown: str) -> None:
    assert plain(text) == shown
