"""What --preempt says, and what it cannot."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepvm.errors import MalformedFile, UsageError
from deepvm.runtime.supervise.fault_injection import DEFAULT_NOTICE_S, Fault, Faults, parse_faults
from tests.support.runtime.machines import machine

CLUSTER = (machine("anchor/0", "on-demand"), machine("worker/0"), machine("worker/1"), machine("worker/2"))
WORKERS = ("worker/0", "worker/1", "worker/2")
HOUR_S = 3600.0


def faults(text: str, seed: int = 0) -> Faults:
    return parse_faults(text, CLUSTER, seed)


def at(seconds: float, *machines: str, notice_s: float = DEFAULT_NOTICE_S) -> Fault:
    return Fault(at_s=seconds, machines=machines, notice_s=notice_s)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("at:20s:worker/2", [at(20, "worker/2")]),
        ("at:20:worker/2", [at(20, "worker/2")]),
        ("at:1.5min:worker/*", [at(90, *WORKERS)]),
        ("at:20s:*", [at(20, *WORKERS)]),
        ("at:20s:worker/1+worker/2+worker/1", [at(20, "worker/1", "worker/2")]),
        ("at:20s:anchor/0", [at(20, "anchor/0")]),  # on demand, but named
        ("at:20s:anchor/0+worker/*", [at(20, "anchor/0", *WORKERS)]),
        ("at:20s:worker/2:notice=5s", [at(20, "worker/2", notice_s=5)]),
        ("at:20s:worker/2:notice=0", [at(20, "worker/2", notice_s=0)]),
        (
            "at:30s:worker/1, at:10s:worker/0:notice=500ms ,notice=7s",
            [at(10, "worker/0", notice_s=0.5), at(30, "worker/1", notice_s=7)],
        ),
    ],
)
def test_times_and_machines_are_taken_as_written(text: str, wanted: list[Fault]) -> None:
    assert faults(text).due(1000) == wanted


def test_each_is_due_once_and_not_before_its_time() -> None:
    made = faults("at:20s:worker/0,at:20s:worker/1,at:25s:worker/2")
    assert made.due(19.9) == []
    assert [fault.machines for fault in made.due(20)] == [("worker/0",), ("worker/1",)]
    assert made.due(24) == []
    assert [fault.machines for fault in made.due(26)] == [("worker/2",)]
    assert made.due(1e9) == []


def test_a_step_can_be_when_however_steps_are_repeated() -> None:
    made = faults("at:step:50:worker/1,at:step:20:worker/*:notice=0,at:3s:worker/2")
    assert made.due(2, step=19) == []
    assert made.due(2, step=21) == [Fault(at_s=None, at_step=20, machines=WORKERS, notice_s=0)]
    assert made.due(2, step=20) == []
    assert [fault.machines for fault in made.due(4, step=51)] == [("worker/2",), ("worker/1",)]
    assert made.due(4, step=50) == []


# --- by chance ----------------------------------------------------------------------------------------------------


def test_chance_takes_each_spot_machine_at_the_given_rate() -> None:
    hours = 2000
    found = faults("poisson:3/h").due(hours * HOUR_S)
    assert {name for fault in found for name in fault.machines} == set(WORKERS)
    for name in WORKERS:
        times = [fault.at_s or 0.0 for fault in found if fault.machines == (name,)]
        assert abs(len(times) / hours - 3) < 5 * (3 / hours) ** 0.5  # five standard deviations
        gaps = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
        assert abs(sum(gap > 1200 for gap in gaps) / len(gaps) - 0.368) < 0.05  # 1/e are longer than the mean
    assert [fault.at_s for fault in found] == sorted(fault.at_s or 0.0 for fault in found)


@given(seed=st.integers(0, 2**40), looks=st.lists(st.floats(0, 1000), max_size=10))
def test_the_same_seed_is_the_same_story_however_often_one_looks(seed: int, looks: list[float]) -> None:
    text = "poisson:60/h,at:100s:worker/1,poisson:2/min:notice=1s"
    looking = faults(text, seed)
    seen = [fault for now_s in [*sorted(looks), 1000] for fault in looking.due(now_s)]
    assert seen == faults(text, seed).due(1000)


def test_other_seeds_are_other_stories() -> None:
    assert faults("poisson:60/h", 1).due(HOUR_S) != faults("poisson:60/h", 2).due(HOUR_S)


def test_chance_leaves_machines_alone_that_are_not_on_spot() -> None:
    with pytest.raises(UsageError, match="no machine of this plan is on spot"):
        parse_faults("poisson:3/h", CLUSTER[:1], 0)


# --- traces -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "seconds,machine,notice_s\n30,worker/1\n10,worker/0,0.5\n",
        "# a comment\n\n 10 , worker/0 , 500ms \n30s,worker/1,\n",
        '{"seconds": 30, "machine": "worker/1"}\n{"seconds": 10, "machine": "worker/0", "notice_s": 0.5}\n',
        '10,worker/0,0.5\n{"seconds": 30, "machine": "worker/1", "notice_s": null}',
    ],
)
def test_a_trace_is_csv_or_lines_of_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "trace").write_text(text, encoding="utf-8")
    wanted = [at(10, "worker/0", notice_s=0.5), at(30, "worker/1", notice_s=9)]
    assert faults(f"trace:{tmp_path / 'trace'}:notice=9s").due(100) == wanted


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("20", "'20' is not seconds,machine[,notice_s]"),
        ("20,worker/1,2,3", "'20,worker/1,2,3' is not seconds,machine[,notice_s]"),
        ("soon,worker/1", "'soon' is not a duration: write it like 90s, 15min, 2h"),
        ("-1,worker/1", "'-1' is not a duration: it must be finite and not negative"),
        ("20,worker/7", "no machine is called 'worker/7': did you mean"),
        ("20,anchor/0", "anchor/0 is not on spot: preempt it with at: instead"),
        ("20,worker/1,never", "'never' is not a duration"),
        ('{"seconds": 20', "not valid JSON"),
        ('{"seconds": 20, "machines": "worker/1"}', "is not seconds,machine[,notice_s]"),
        ('{"seconds": true, "machine": "worker/1"}', "True is not a duration"),
    ],
)
def test_a_bad_line_of_a_trace_is_named(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"10,worker/1\n{line}\n", encoding="utf-8")
    with pytest.raises(MalformedFile) as caught:
        faults(f"trace:{path}")
    assert str(caught.value).startswith(f"{path}, line 2: ")
    assert problem in str(caught.value)


def test_a_trace_that_is_not_there_or_says_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MalformedFile, match=r"missing: it cannot be read: No such file or directory"):
        faults(f"trace:{tmp_path / 'missing'}")
    (tmp_path / "empty").touch()
    with pytest.raises(MalformedFile, match=r"empty: it has no line of seconds,machine"):
        faults(f"trace:{tmp_path / 'empty'}")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(MalformedFile, match="binary: it cannot be read"):
        faults(f"trace:{tmp_path / 'binary'}")


# --- bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--preempt '' names no machines: write at:20s:worker/2, "),
        (" , ", "--preempt ' , ' names no machines"),
        ("notice=2s", "--preempt 'notice=2s' names no machines"),
        ("worker/2", "--preempt 'worker/2': unknown fault: write at:20s:worker/2, "),
        ("at:20s", "--preempt 'at:20s': the machine is missing: write it like at:20s:worker/2"),
        ("at:soon:worker/1", "--preempt 'at:soon:worker/1': 'soon' is not a duration: write it like 90s, 15min, 2h"),
        ("at:-5s:worker/1", "--preempt 'at:-5s:worker/1': '-5s' is not a duration: it must be finite and not negative"),
        ("poisson:3/h,at:5s:worker/7", "--preempt 'at:5s:worker/7': no machine is called 'worker/7': did you mean "),
        ("at:5s:worker/1+", "--preempt 'at:5s:worker/1+': no machine is called ''"),
        ("at:5s:anchor/*", "--preempt 'at:5s:anchor/*': no machine on spot matches anchor/*: "),
        (
            "at:step:x:worker/1",
            "--preempt 'at:step:x:worker/1': 'x' is not a valid step: write it like",
        ),
        ("at:step:0:worker/1", "'0' is not a valid step"),
        ("at:step:\u00b2:worker/1", "is not a valid step"),
        ("trace:\0", "it cannot be read"),
        ("at:step:5", "the machine is missing"),
        ("poisson:3", "--preempt 'poisson:3': '3' is not a valid rate: write it like 3/h, in s, min, h or d"),
        ("poisson:0/h", "'0/h' is not a valid rate"),
        ("poisson:-3/h", "'-3/h' is not a valid rate"),
        ("poisson:inf/h", "'inf/h' is not a valid rate"),
        ("poisson:1e9/s", "at most 1/s"),
        ("at:5s:worker/1:notice=x", "--preempt 'at:5s:worker/1:notice=x': 'x' is not a duration"),
        ("at:5s:worker/1,notice=-2s", "--preempt 'notice=-2s': '-2s' is not a duration"),
    ],
)
def test_what_cannot_be_understood_is_reported_with_its_place(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        faults(text)
    assert message in str(caught.value)


@given(text=st.text(st.sampled_from("at:step:poisson:20s/h,+*=worker/1notice. \u0660\u00b2"), max_size=30))
def test_any_text_is_understood_or_refused(text: str) -> None:
    with contextlib.suppress(UsageError):
        faults(text).due(10, step=10)
