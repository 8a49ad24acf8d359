"""Workers that fail: what is shown of it, and whether they are started again."""

from __future__ import annotations

import pytest

from deepvm.runtime.hub.failures import Restarts, ended_by, error_line, error_text
from deepvm.runtime.log_tail import script_output

LOGGED = "2026-11-18 03:20:48,123 deepvm.runtime: worker/0 joins\n"
IMPORTS = """Traceback (most recent call last):
  File "/home/me/train.py", line 3, in <module>
    import nothing_of_that_name
ModuleNotFoundError: No module named 'nothing_of_that_name'
"""
SYNTAX = """  File "/home/me/train.py", line 2
    def main(:
             ^
SyntaxError: invalid syntax
"""
USAGE = "usage: train.py [-h] [--lr LR]\ntrain.py: error: unrecognized arguments: --bogus\n"
LOG_LINE = "2026-11-18 11:17:07,934 deepvm.runtime.workers.elastic: started 1 workers from the template in 0.034 s"


def test_a_line_that_deepvm_logged_into_is_the_scripts_own_up_to_there() -> None:
    assert script_output(f"only this{LOG_LINE}") == "only this"
    assert error_text(f"{LOG_LINE}\nonly this{LOG_LINE}\n\n{LOG_LINE}\n") == "only this"


@pytest.mark.parametrize("line", ["I use deepvm.Checkpointer", "E1 loss 0.5", "W1 norm 2.0", "[W] careful"])
def test_what_a_script_prints_is_not_taken_for_a_log_of_deepvm_or_torch(line: str) -> None:
    assert script_output(line) == line


@pytest.mark.parametrize(
    "line",
    [
        LOG_LINE,
        "W1118 11:17:09.108000 2364 torch/distributed/elastic/agent/server/api.py:753] Received 15 death signal",
        "[W1118 11:17:09.108000000 socket.cpp:767] [c10d] The client socket cannot be initialized",
        "[rank1]:[W1118 11:17:09.108000000 ProcessGroupGloo.cpp:767] Warning",
    ],
)
def test_logs_of_deepvm_and_torch_are_not_the_scripts(line: str) -> None:
    assert script_output(line) == ""


RANKED = "".join(f"[rank1]: {line}\n" for line in IMPORTS.replace("ModuleNotFound", "ZeroDivision").splitlines())
CHAINED = (
    "epoch 1\n" + IMPORTS.replace("ModuleNotFoundError", "KeyError")
    + "\nDuring handling of the above exception, another exception occurred:\n\n"
    + IMPORTS.replace("ModuleNotFoundError", "mine.Strange")
)  # fmt: skip


@pytest.mark.parametrize(
    ("said", "line"),
    [
        (IMPORTS, "ModuleNotFoundError: No module named 'nothing_of_that_name'"),
        (LOGGED + IMPORTS + LOGGED, "ModuleNotFoundError: No module named 'nothing_of_that_name'"),
        (SYNTAX, "SyntaxError: invalid syntax"),
        (USAGE, "train.py: error: unrecognized arguments: --bogus"),
        (RANKED, "ZeroDivisionError: No module named 'nothing_of_that_name'"),
        (CHAINED, "mine.Strange: No module named 'nothing_of_that_name'"),
        ("Killed\n", ""),
        ("", ""),
    ],
)
def test_the_line_that_names_the_error_is_found(said: str, line: str) -> None:
    assert error_line(said) == line


def test_a_traceback_is_shown_whole_with_what_led_to_it_and_nothing_else() -> None:
    shown = error_text(LOGGED + "step 1\n" + CHAINED + LOGGED)
    assert shown.startswith("Traceback")
    assert shown.count("Traceback") == 2
    assert "deepvm.runtime" not in shown


def test_what_would_fail_again_is_not_tried_again() -> None:
    for said in (IMPORTS, SYNTAX, USAGE):
        refused = Restarts(3).refuse(said, stepped=False)
        assert refused is not None
        assert error_line(said) in refused
    assert Restarts(3).refuse(IMPORTS, stepped=True) is None, "a lazy import of a worker that trains"


def test_the_same_failure_before_the_first_step_is_tried_twice_and_another_is_tried_on() -> None:
    restarts = Restarts(3)
    assert restarts.refuse(RANKED, stepped=False) is None
    assert "twice in the same way" in str(restarts.refuse(RANKED, stepped=False))
    restarts = Restarts(2)
    assert restarts.refuse(RANKED, stepped=False) is None
    assert restarts.refuse(RANKED, stepped=True) is None
    assert restarts.refuse(RANKED, stepped=False) == "failed after 2 restarts"


def test_the_same_exit_code_twice_before_the_first_step_ends_the_run_and_a_signal_does_not() -> None:
    restarts = Restarts(3)
    assert restarts.refuse("x\n", stepped=False, code=3) is None
    assert restarts.refuse("x\n", stepped=False, code=3) == (
        "failed twice in the same way before the first step: exit code 3"
    )
    restarts = Restarts(3)
    assert [restarts.refuse("x\n", stepped=False, code=code) for code in (3, 4, -9)] == [None, None, None]
    assert [ended_by(code) for code in (3, 0, -9, -200)] == [
        "exit code 3",
        "",
        "ended by SIGKILL",
        "ended by signal 200",
    ]
