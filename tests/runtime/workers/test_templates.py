"""Workers forked from a template are what fresh interpreters would be, only sooner; and templates refuse to lie."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from deepvm.errors import TemplateError
from deepvm.runtime import Template
from deepvm.runtime.workers import fd_messages, fork_safety
from tests.support import ROOT
from tests.support.processes import gone
from tests.support.runtime import template_jobs
from tests.support.waiting import wait_until

HERE = str(ROOT)
PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def template() -> Iterator[Template]:
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    with Template(preload=["torch", "numpy.random"], env=env, first_path=HERE) as made:
        yield made.ready()


def described(template: Template, path: Path, *names: str, **how: Any) -> dict[str, Any]:
    how.setdefault("env", template.env)
    worker = template.start(template_jobs.describe, [str(path), *names], **how)
    assert worker.wait(timeout_s=PATIENCE_S) == 0
    told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert told["pid"] == worker.pid
    return told


# --- as good as fresh ---------------------------------------------------------------------------------------------


def test_a_worker_begins_with_torch_in_a_clean_process_of_its_own(template: Template, tmp_path: Path) -> None:
    told = described(template, tmp_path / "told", cwd=str(tmp_path))
    assert told["imported"]
    assert told["ppid"] == template.pid
    assert told["group"] == told["pid"]
    assert told["threads"] == 1
    assert told["sigint"]
    assert told["cwd"] == str(tmp_path)
    assert len(told["files"]) <= 4, "only its streams are open, and the directory that it reads"


def test_random_numbers_are_those_of_fresh_interpreters(template: Template, tmp_path: Path) -> None:
    first, second = (described(template, tmp_path / name) for name in ("first", "second"))
    assert first["random"] != second["random"]
    assert first["numpy"] != second["numpy"]
    assert first["torch"] != second["torch"]


def test_a_seed_that_a_preloaded_module_sets_stays(tmp_path: Path) -> None:
    (tmp_path / "seeds.py").write_text("import torch; torch.manual_seed(7)")
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    with Template(preload=["torch", "seeds"], first_path=str(tmp_path)) as one:
        first, second = (described(one, tmp_path / name) for name in ("first", "second"))
    assert first["torch"] == second["torch"] == torch.rand(3, generator=torch.Generator().manual_seed(7)).tolist()


def test_the_environment_is_the_workers_own(template: Template, tmp_path: Path) -> None:
    base = dict(template.env)
    names = ("DEEPVM_NEW", "CUDA_VISIBLE_DEVICES", "HOME")
    asked = {**base, "DEEPVM_NEW": "1", "CUDA_VISIBLE_DEVICES": "3"}
    del asked["HOME"]
    told = described(template, tmp_path / "told", *names, env=asked)
    wanted = {"DEEPVM_NEW": "1", "CUDA_VISIBLE_DEVICES": "3", "HOME": None}
    assert told["env"] == wanted
    assert told["c_env"] == wanted
    again = described(template, tmp_path / "again", *names)
    assert again["env"]["DEEPVM_NEW"] is None


def test_a_large_environment_with_bytes_that_are_no_text_arrives(template: Template, tmp_path: Path) -> None:
    large = {f"DEEPVM_LARGE_{n}": str(n) * 100_000 for n in range(4)}
    odd = os.fsdecode(b"caf\xe9")
    told = described(
        template, tmp_path / "told", *large, "DEEPVM_ODD", env={**template.env, **large, "DEEPVM_ODD": odd}
    )
    assert told["env"] == {**large, "DEEPVM_ODD": odd}


def test_several_threads_may_ask_for_workers_at_once(tmp_path: Path) -> None:
    with Template(preload=[], first_path=HERE) as template, ThreadPoolExecutor(8) as pool:
        workers = list(pool.map(lambda _: template.start(template_jobs.leave, ["exit"]), range(24)))
        assert [worker.wait(timeout_s=PATIENCE_S) for worker in workers] == [3] * 24
        assert len({worker.pid for worker in workers}) == 24


def test_a_number_of_threads_given_after_the_template_started_is_obeyed(template: Template, tmp_path: Path) -> None:
    for count in (1, 2):
        told = described(template, tmp_path / "told", env={**template.env, "OMP_NUM_THREADS": str(count)})
        assert told["num_threads"] == count


@pytest.mark.parametrize("name", ["LD_PRELOAD", "PYTHONPATH", "OMP_PROC_BIND", "MKL_NUM_THREADS"])
def test_a_variable_that_would_have_no_effect_is_refused(template: Template, name: str) -> None:
    with pytest.raises(TemplateError, match=f"{name} is 'other' for the worker"):
        template.start(template_jobs.compute, env={**template.env, name: "other"})


def test_what_a_preloaded_module_set_in_the_environment_is_kept(tmp_path: Path) -> None:
    (tmp_path / "sets_it.py").write_text("import os; os.environ['SET_BY_IMPORT'] = 'yes'")
    (tmp_path / "tells_it.py").write_text(
        "import os; tell = lambda: print(os.environ.get('SET_BY_IMPORT'), flush=True)"
    )
    with Template(preload=["sets_it"], first_path=str(tmp_path)) as template:
        assert streamed(template, tmp_path, "tells_it:tell")[1] == "yes\n"
        asked = {**os.environ, "SET_BY_IMPORT": "no"}
        assert streamed(template, tmp_path, "tells_it:tell", env=asked)[1] == "no\n"


def streamed(template: Template, tmp_path: Path, target: Any, *args: Any, **how: Any) -> tuple[int, str, str]:
    """Exit code, output and errors of a worker."""
    how.setdefault("env", template.env)
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        worker = template.start(target, list(args), stdout=out.fileno(), stderr=err.fileno(), **how)
    code = worker.wait(timeout_s=PATIENCE_S)
    return code, (tmp_path / "out").read_text(), (tmp_path / "err").read_text()


def test_streams_are_redirected(template: Template, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("a line\n")
    with (tmp_path / "in").open() as given:
        code, out, err = streamed(template, tmp_path, template_jobs.talk, stdin=given.fileno())
    assert (code, out, err) == (0, "out: tables are set\nin: a line\n", "err: but nobody came\n")


@pytest.mark.parametrize(
    ("how", "code"),
    [("exit", 3), ("exit-with-words", 1), ("at once", 4), ("killed", -9), ("interrupted", -2), ("error", 1), ("", 0)],
)
def test_exit_codes_are_those_of_a_fresh_interpreter(template: Template, tmp_path: Path, how: str, code: int) -> None:
    assert streamed(template, tmp_path, template_jobs.leave, how)[0] == code


def test_an_error_is_shown_from_the_targets_first_frame_on(template: Template, tmp_path: Path) -> None:
    _, _, err = streamed(template, tmp_path, template_jobs.leave, "error")
    first, place, *_, last = err.splitlines()
    assert first == "Traceback (most recent call last):"
    assert "template_jobs.py" in place
    assert last == "ValueError: the oven is cold"
    assert "deepvm" not in err.replace(HERE, "")


def test_a_worker_waits_for_its_threads_and_runs_its_exit_handlers(template: Template, tmp_path: Path) -> None:
    assert streamed(template, tmp_path, template_jobs.leave, "late", str(tmp_path / "late"))[0] == 0
    assert (tmp_path / "late").read_text() == "at exit"
    assert (tmp_path / "late-thread").read_text() == "done"


def test_operations_on_several_threads_run_in_a_worker(template: Template) -> None:
    assert template.start(template_jobs.compute, env=template.env).wait(timeout_s=PATIENCE_S) == 0


# --- signals and ends ---------------------------------------------------------------------------------------------


def test_a_signal_reaches_the_worker_and_its_children(template: Template, tmp_path: Path) -> None:
    worker = template.start(template_jobs.sleep_with_child, [str(tmp_path / "pids")], env=template.env)
    wait_until((tmp_path / "pids").exists)
    wait_until(lambda: len((tmp_path / "pids").read_text().split()) == 2)
    child = int((tmp_path / "pids").read_text().split()[1])
    with pytest.raises(TimeoutError, match="still runs"):
        worker.wait(timeout_s=0.01)
    worker.terminate()
    assert worker.wait(timeout_s=PATIENCE_S) == -signal.SIGTERM
    wait_until(lambda: gone(child))
    worker.kill()  # of what has ended: nothing happens


def test_a_worker_can_handle_a_signal(template: Template, tmp_path: Path) -> None:
    worker = template.start(template_jobs.on_sigterm, [str(tmp_path / "said")], env=template.env)
    wait_until(lambda: (tmp_path / "said").exists() and (tmp_path / "said").read_text() == "ready")
    worker.terminate()
    assert worker.wait(timeout_s=PATIENCE_S) == 7
    assert (tmp_path / "said").read_text() == "got it"


def test_workers_die_with_their_template_and_the_next_one_comes_from_a_new_template(tmp_path: Path) -> None:
    with Template(preload=[], first_path=HERE) as template:
        worker = template.start(template_jobs.sleep_with_child, [str(tmp_path / "pids")])
        first = template.pid
        os.kill(first, signal.SIGKILL)
        assert worker.wait(timeout_s=PATIENCE_S) == -signal.SIGKILL
        wait_until(lambda: gone(worker.pid))
        wait_until(lambda: gone(first))
        assert template.start(template_jobs.leave, ["exit"]).wait(timeout_s=PATIENCE_S) == 3
        assert template.pid != first


def test_nothing_is_left_when_the_owner_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from deepvm.runtime import Template; t = Template(preload=[], first_path=sys.argv[1]);"
        "w = t.start('tests.support.runtime.template_jobs:sleep_with_child', [sys.argv[2]]);"
        "print(t.pid, w.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, HERE, str(tmp_path / "pids")], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        pids = [int(word) for word in owner.stdout.readline().split()]
        wait_until(lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text().count(" "))
        pids += [int(word) for word in (tmp_path / "pids").read_text().split()]
        owner.kill()
    wait_until(lambda: all(gone(pid) for pid in pids))


def test_closing_ends_everything_and_leaks_no_descriptor(tmp_path: Path) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    with Template(preload=[], first_path=HERE) as template:
        workers = [template.start(template_jobs.leave, ["exit"]) for _ in range(5)]
        assert [w.wait(timeout_s=PATIENCE_S) for w in workers[:3]] == [3, 3, 3]
        sleeper = template.start(template_jobs.sleep_with_child, [str(tmp_path / "pids")])
        pids = [template.pid, sleeper.pid]
    assert all(gone(pid) for pid in pids)
    assert sleeper.returncode is not None
    assert sorted(os.listdir("/proc/self/fd")) == before
    with pytest.raises(TemplateError, match="closed"):
        template.start(template_jobs.leave)


def test_only_functions_that_a_worker_can_find_are_taken(template: Template) -> None:
    with pytest.raises(TemplateError, match="cannot be imported by a worker"):
        template.start(lambda: None)
    code = template.start(
        "tests.support.runtime.template_jobs:no_such", env=template.env, stderr=os.open(os.devnull, os.O_RDWR)
    )
    assert code.wait(timeout_s=PATIENCE_S) == 1


# --- what a template refuses --------------------------------------------------------------------------------------

REFUSED = {
    "starts_a_thread": (
        "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        "left 1 more thread running",
    ),
    "runs_two_threads": (
        "import torch; torch.set_num_threads(2); torch.ones(1500, 1500) @ torch.ones(1500, 1500)",
        r"left \d more threads? running",
    ),
    "breaks": ("raise RuntimeError('no flour')", "RuntimeError: no flour"),
    "is_not_there": (None, "ModuleNotFoundError"),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_preload_that_rules_out_forking_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    source, told = REFUSED[name]
    if source is not None:
        (tmp_path / f"{name}.py").write_text(source)
    with Template(preload=["json", name], first_path=str(tmp_path)) as template:
        with pytest.raises(TemplateError, match=f"{name}.*{told}"):
            template.ready()
        assert gone(template.pid)
        with pytest.raises(TemplateError):
            template.start(template_jobs.leave)


def test_a_gpus_context_is_seen_by_the_device_it_keeps_open() -> None:
    assert fork_safety._cuda(["/dev/null", "pipe:[1]"]) is None
    assert "/dev/nvidia-uvm" in str(fork_safety._cuda(["/dev/null", "/dev/nvidia-uvm"]))


def test_an_import_that_takes_for_ever_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time; time.sleep(60)")
    with (
        Template(preload=["slow"], first_path=str(tmp_path), timeout_s=0.5) as template,
        pytest.raises(TemplateError, match=r"did not import slow within 0\.5 s"),
    ):
        template.ready()
    assert gone(template.pid)


def test_a_template_that_dies_while_it_imports_is_reported(tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text("import os; os._exit(9)")
    with (
        Template(preload=["dies"], first_path=str(tmp_path)) as template,
        pytest.raises(TemplateError, match="exit code 9"),
    ):
        template.ready()


# --- forked off the process that owns it -----------------------------------------------------------------------------

OWNER = """
import json, os, sys, threading, time
from deepvm.runtime import Template

secret = os.open(os.devnull, os.O_RDONLY)
told = lambda: print("in the fork", flush=True)
began = time.monotonic()
template = Template.fork_here(preload=["decimal"], first_path=sys.argv[2], in_fork=told)
if template is None:
    print("the worker leaves through the front door", flush=True)
    sys.exit(5)
threading.Thread(target=threading.Event().wait, daemon=True).start()  # the owner may have threads now
def streams(pid):
    return [os.readlink(f"/proc/{pid}/fd/{number}") for number in range(3)]

with template:
    print("streams", streams(template.pid) == streams("self"), flush=True)
    path, run = sys.argv[1], "deepvm.runtime.workers.forked_worker:run_script"
    with open(path, "w") as file:
        file.write("import os, sys; print(sorted(map(int, os.listdir('/proc/self/fd'))), __name__, sys.argv)")
    codes = [template.start(run, [path, ["a"], False]).wait(timeout_s=30) for _ in range(2)]
    print(codes, 0 < template.import_s <= time.monotonic() - began, flush=True)
    os.kill(template.pid, 9)
    template._process.wait(10)
    print(template.start(run, [path, ["b"], False]).wait(timeout_s=60), flush=True)
"""


def test_a_template_forked_off_its_owner_is_one_import_for_both_and_its_workers_are_as_fresh(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "always::ResourceWarning", "-c", OWNER, str(tmp_path / "script.py"), HERE],
        capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert "unclosed <socket" not in done.stderr
    assert lines.count("in the fork") == 1
    workers = [line for line in lines if "__main__" in line]
    assert len(workers) == 3  # the third of a template that was started again after it died
    assert all(str(tmp_path / "script.py") in line for line in workers)
    assert workers[0].startswith("[0, 1, 2, 3]")  # 3 is the listing itself: nothing of the owner's
    assert "[5, 5] True" in lines
    assert "streams True" in lines
    assert lines.count("the worker leaves through the front door") == 2
    assert lines[-1] == "0"


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b'{"refused": "the template left 1 more thread running"}\n', "the template left 1 more thread running"),
        (b"", "the template died, or forked no worker within 30 s"),
    ],
)
def test_a_template_that_forks_no_worker_says_why(answer: bytes, problem: str) -> None:
    ours, theirs = socket.socketpair()
    theirs.settimeout(PATIENCE_S)
    process: Any = subprocess.Popen(["sleep", "60"])

    def answers() -> None:
        message, descriptors = fd_messages.receive(theirs, 4) or ({}, [])
        asked.append(message)
        if answer:
            os.write(descriptors[-1], answer)
        for descriptor in descriptors:
            os.close(descriptor)

    asked: list[dict[str, Any]] = []
    with theirs, Template(preload=[], forked=(ours, process)) as template, ThreadPoolExecutor(1) as pool:
        told = pool.submit(answers)
        with pytest.raises(TemplateError) as caught:
            template.start("a:b", [1, "two"], env=template.env, cwd="/")
        told.result(PATIENCE_S)
        process.kill()
    assert str(caught.value) == problem
    assert asked == [{"do": "start", "target": "a:b", "args": [1, "two"], "env": template.env, "cwd": "/"}]


RUN = "deepvm.runtime.workers.forked_worker:run_script"
SEES = "import json, os, sys; print(json.dumps([sys.path[0], __name__, sys.argv, os.path.realpath(__file__)]))"


def test_a_script_and_a_module_see_themselves_as_under_python(template: Template, tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "scripts", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    script = folder / "sees.py"
    script.write_text(SEES)
    code, out, _ = streamed(template, tmp_path, RUN, str(script), ["a", "b"], False, cwd=str(elsewhere))
    assert (code, json.loads(out)) == (0, [str(folder), "__main__", [str(script), "a", "b"], str(script)])
    code, out, _ = streamed(template, tmp_path, RUN, "sees", ["c"], True, cwd=str(folder))
    assert (code, json.loads(out)) == (0, [str(folder), "__main__", [str(script), "c"], str(script)])
    code, out, err = streamed(template, tmp_path, RUN, "absent.py", [], False, cwd=str(folder))
    assert (code, out) == (2, "")
    assert err.startswith(f"can't open file '{folder}/absent.py': ")


def test_a_worker_has_its_owners_streams_and_directory_unless_others_are_given(
    template: Template, tmp_path: Path
) -> None:
    script = tmp_path / "compares.py"
    script.write_text(
        "import os, sys\n"
        "found = [os.getcwd(), *(os.readlink(f'/proc/self/fd/{number}') for number in range(3))]\n"
        "sys.exit(0 if found == sys.argv[1:] else f'{found}, not {sys.argv[1:]}')\n"
    )
    own = [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]
    worker = template.start(RUN, [str(script), [os.getcwd(), *own], False], env=template.env)
    assert worker.wait(timeout_s=PATIENCE_S) == 0
