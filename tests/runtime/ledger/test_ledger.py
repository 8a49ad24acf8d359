"""The ledger: what was appended stays as it was, whoever is killed and whoever reads meanwhile."""

from __future__ import annotations

import json
import math
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepvm.errors import MalformedFile, UsageError
from deepvm.events import KINDS, LATEST_S, Event
from deepvm.runtime.cluster import Cluster, Machine
from deepvm.runtime.ledger.ledger import Ledger, LedgerError
from deepvm.runtime.ledger.sqlite_file import being_written

CLUSTER = Cluster(
    machines=(
        Machine(
            name="worker/0", role="worker", instance="g4dn.xlarge", market="spot", usd_per_hour=0.1578,
            on_demand_usd_per_hour=0.526, region="us-east-1", zone="us-east-1a",
        ),
        Machine(
            name="memory/0", role="memory", instance="c5.xlarge", market="on-demand", usd_per_hour=0.17,
            on_demand_usd_per_hour=None,
        ),
    ),
    architecture="tiering", catalog="paper-aws-2023", checkpoint_bytes=300_000_000, restore_s=2.5,
    notes=("smaller than the plan",), plan={"format": "deepvm-plan/1", "recommendations": []},
)  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run one?" / "ledger.sqlite"


@pytest.fixture
def ledger(path: Path) -> Iterator[Ledger]:
    path.parent.mkdir()
    with Ledger.create(path, run="one", cluster=CLUSTER) as ledger:
        yield ledger


def steps(first: int, last: int) -> list[Event]:
    return [Event(at_s=float(n), kind="step", data={"step": n, "seconds": 0.5}) for n in range(first, last + 1)]


def test_what_was_appended_is_read_in_order_with_its_numbers(ledger: Ledger, path: Path) -> None:
    started = Event(at_s=1.25, kind="run-started", data={"resumed": False, "settings": {"lr": 0.1, "names": ["ä"]}})
    down = Event(at_s=0.5, kind="machine-down", machine="worker/0", data={"why": "lost", "exit_code": None})
    ledger.append([started])
    ledger.append(iter([*steps(1, 3), down]))
    ledger.append([])
    with Ledger.open(path) as reader:
        assert (reader.run, reader.cluster) == ("one", CLUSTER)
        assert list(reader.events()) == [started, *steps(1, 3), down]
        assert list(reader.events("step")) == steps(1, 3)
        assert list(reader.events(after=3)) == [*steps(3, 3), down]
        assert list(reader.events("step", after=2)) == steps(2, 3)
        assert list(reader.events(after=5)) == []


def test_a_long_ledger_is_read_in_parts_that_leave_nothing_out(ledger: Ledger) -> None:
    ledger.append(steps(1, 25_000))
    assert [event.data["step"] for event in ledger.events()] == list(range(1, 25_001))
    assert [event.data["step"] for event in ledger.events("step", after=24_990)] == list(range(24_991, 25_001))


def test_a_resumed_run_continues_in_its_ledger(ledger: Ledger, path: Path) -> None:
    ledger.append([Event(at_s=1, kind="run-started", data={"resumed": False})])
    ledger.close()
    with Ledger.open(path, write=True) as again:
        again.append([Event(at_s=9, kind="run-started", data={"resumed": True})])
        assert [event.data["resumed"] for event in again.events("run-started")] == [False, True]


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE events SET kind = 'step'",
        "DELETE FROM events",
        "INSERT OR REPLACE INTO events VALUES (1, 0, 'step', NULL, '{}')",
        "UPDATE facts SET value = 'other'",
        "DELETE FROM facts",
        "INSERT OR REPLACE INTO facts VALUES ('run', 'other')",
    ],
)
def test_nothing_that_was_written_can_be_changed_or_removed(ledger: Ledger, path: Path, statement: str) -> None:
    ledger.append(steps(1, 2))
    database = sqlite3.connect(path, timeout=10)
    try:
        with pytest.raises(sqlite3.IntegrityError, match="only grows"), database:
            database.execute(statement)
    finally:
        database.close()
    assert list(ledger.events()) == steps(1, 2)


def test_a_batch_with_one_bad_event_leaves_nothing_behind(ledger: Ledger) -> None:
    with pytest.raises(UsageError, match="cannot be written as JSON"):
        ledger.append([*steps(1, 2), Event(at_s=3, kind="step", data={"step": object()})])
    with pytest.raises(UsageError, match="not a valid time"):
        ledger.append([*steps(1, 2), Event(at_s=float("nan"), kind="step")])
    assert list(ledger.events()) == []
    ledger.append(steps(1, 1))
    assert list(ledger.events()) == steps(1, 1)


def test_what_is_not_finite_is_written_as_missing(ledger: Ledger) -> None:
    ledger.append([Event(at_s=1, kind="save", data={"stall_s": float("inf"), "more": [1.0, float("nan")], "step": 7})])
    assert [event.data for event in ledger.events()] == [{"stall_s": None, "more": [1.0, None], "step": 7}]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=3,
)
_EVENTS = st.builds(
    Event,
    at_s=st.floats(-LATEST_S, LATEST_S),
    kind=st.sampled_from(sorted(KINDS)),
    machine=st.none() | st.text(),
    data=st.dictionaries(st.text(), _JSON, max_size=4),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=st.lists(_EVENTS, max_size=5))
def test_any_event_comes_back_as_it_was(ledger: Ledger, events: list[Event]) -> None:
    before = sum(1 for _ in ledger.events())
    ledger.append(events)
    assert list(ledger.events(after=before)) == events


def test_another_process_reads_while_it_is_written(ledger: Ledger, path: Path) -> None:
    follow = """
import sys, time
from deepvm.runtime.ledger.ledger import Ledger
from deepvm.runtime.ledger.sqlite_file import being_written
seen, deadline = 0, time.monotonic() + 60
with Ledger.open(sys.argv[1]) as ledger:
    print("ready", flush=True)
    while seen < 400 and time.monotonic() < deadline:
        for event in ledger.events(after=seen):
            seen += 1
            assert event.data["step"] == seen, (seen, event)
print(seen, being_written(ledger.path))
"""
    reader = subprocess.Popen([sys.executable, "-c", follow, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "ready\n"
        for number in range(1, 401, 4):
            ledger.append(steps(number, number + 3))
        assert reader.communicate(timeout=60)[0] == "400 True\n"
    finally:
        reader.kill()
        reader.wait(timeout=10)
    assert reader.returncode == 0


def test_what_was_appended_survives_a_kill_of_the_writer(ledger: Ledger, path: Path) -> None:
    ledger.close()
    write = """
import itertools, sys
from deepvm.events import Event
from deepvm.runtime.ledger.ledger import Ledger
ledger = Ledger.open(sys.argv[1], write=True)
for n in itertools.count(1):
    ledger.append([Event(at_s=n, kind="step", data={"step": n})])
    print(n, flush=True)
"""
    writer = subprocess.Popen([sys.executable, "-c", write, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert writer.stdout is not None
        told = [writer.stdout.readline() for _ in range(200)]
        with Ledger.open(path) as reader:
            assert being_written(reader.path)
        os.kill(writer.pid, signal.SIGKILL)
        told += writer.stdout.readlines()
        writer.stdout.close()
    finally:
        writer.kill()
        writer.wait(timeout=10)
    with Ledger.open(path) as reader:
        found = [event.data["step"] for event in reader.events()]
        assert not being_written(reader.path)
    assert found == list(range(1, len(found) + 1))
    assert len(found) - len(told) in (0, 1)  # killed between the append and the word about it
    with Ledger.open(path, write=True) as again:
        again.append(steps(1, 1))
        assert sum(1 for _ in again.events()) == len(found) + 1


def test_a_second_writer_is_refused_while_the_first_one_lives(
    ledger: Ledger, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepvm.runtime.ledger.sqlite_file.LOCK_S", 0.05)
    with pytest.raises(LedgerError, match="that run is not over"):
        Ledger.open(path, write=True)
    ledger.close()
    with Ledger.open(path, write=True) as second:
        assert being_written(second.path)


def test_threads_append_and_read_at_once(ledger: Ledger) -> None:
    def write() -> None:
        for n in range(50):
            ledger.append(steps(n, n))

    writers = [threading.Thread(target=write) for _ in range(4)]
    for writer in writers:
        writer.start()
    deadline = time.monotonic() + 60
    while sum(1 for _ in ledger.events()) < 200 and time.monotonic() < deadline:
        pass
    for writer in writers:
        writer.join(timeout=60)
    assert sorted(event.data["step"] for event in ledger.events()) == sorted(list(range(50)) * 4)


def test_only_its_owner_can_read_the_file(ledger: Ledger, path: Path) -> None:
    ledger.append(steps(1, 1))
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
    assert set(modes.values()) == {0o600}, modes


def test_a_ledger_open_for_reading_is_not_written(ledger: Ledger, path: Path) -> None:
    with Ledger.open(path) as reader, pytest.raises(UsageError, match="for reading only"):
        reader.append(steps(1, 1))


def test_a_ledger_that_exists_is_not_made_again(ledger: Ledger, path: Path) -> None:
    with pytest.raises(UsageError, match="exists already: resume"):
        Ledger.create(path, run="two", cluster=CLUSTER)


def test_a_ledger_in_a_folder_that_cannot_be_written_is_read() -> None:
    read = """
import os, sys
from deepvm.runtime.ledger.ledger import Ledger
from deepvm.runtime.ledger.sqlite_file import being_written
if os.getuid() == 0:  # who may write everywhere
    os.setuid(65534)
with Ledger.open(sys.argv[1]) as ledger:
    print(len(list(ledger.events())), being_written(ledger.path), os.access(os.path.dirname(sys.argv[1]), os.W_OK))
"""
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are in one that is closed to other users
        path = Path(folder, "ledger.sqlite")
        with Ledger.create(path, run="one", cluster=CLUSTER) as ledger:
            ledger.append(steps(1, 3))
        path.chmod(0o444)
        Path(folder).chmod(0o555)
        try:
            done = subprocess.run(
                [sys.executable, "-c", read, str(path)], capture_output=True, text=True, timeout=60, check=False
            )
        finally:
            Path(folder).chmod(0o700)
    assert (done.stdout, done.stderr) == ("3 False False\n", "")


class TestFilesThatAreNone:
    def test_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="does not exist"):
            Ledger.open(tmp_path / "ledger.sqlite", write=True)
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(UsageError, match="cannot be created"):
            Ledger.create(tmp_path / "no" / "ledger.sqlite", run="one", cluster=CLUSTER)

    @pytest.mark.parametrize(
        ("content", "why"),
        [
            (b"", "it is empty"),
            (b"a plan, perhaps" * 100, "not a valid ledger"),
            (b"SQLite format 3\x00" * 99, "not a valid ledger"),
        ],
    )
    def test_another_file(self, tmp_path: Path, content: bytes, why: str) -> None:
        path = tmp_path / "ledger.sqlite"
        path.write_bytes(content)
        for write in (False, True):
            with pytest.raises(MalformedFile, match=why):
                Ledger.open(path, write=write)
        assert path.read_bytes() == content

    def test_another_sqlite_file(self, tmp_path: Path) -> None:
        path = tmp_path / "ledger.sqlite"
        database = sqlite3.connect(path)
        database.execute("CREATE TABLE events(id)")
        database.close()
        with pytest.raises(MalformedFile, match="an SQLite file, but not a ledger"):
            Ledger.open(path)

    def test_another_version(self, ledger: Ledger, path: Path) -> None:
        ledger.close()
        database = sqlite3.connect(path)
        database.execute("PRAGMA user_version = 7")
        database.close()
        with pytest.raises(MalformedFile, match="its format is 7, this deepvm reads 1: use the deepvm that wrote it"):
            Ledger.open(path)

    def test_damaged_anywhere_it_is_read_or_refused_in_one_sentence(self, ledger: Ledger, path: Path) -> None:
        ledger.append(steps(1, 2000))
        ledger.close()
        whole = path.read_bytes()
        refused = []
        for place in range(0, len(whole), 4096):
            damaged = bytearray(whole)
            damaged[place : place + 2048] = b"\xff" * 2048
            path.write_bytes(damaged)
            try:
                with Ledger.open(path) as reader:
                    list(reader.events())
            except (MalformedFile, LedgerError) as error:
                refused.append(str(error))
        assert len(refused) > len(whole) / 4096 / 2
        assert all(sentence.startswith(str(path)) and "\n" not in sentence for sentence in refused)

    def test_cut_off(self, ledger: Ledger, path: Path) -> None:
        ledger.append(steps(1, 2000))
        ledger.close()
        path.write_bytes(path.read_bytes()[: 3 * 4096])
        with pytest.raises(MalformedFile, match=r"damaged|not a valid ledger"), Ledger.open(path) as reader:
            list(reader.events())

    @pytest.mark.parametrize(
        ("kind", "data", "why"),
        [
            ("later-invention", "{}", "unknown kind of event: 'later-invention'"),
            ("step", '{"step": ', "Expecting value"),
            ("step", "[1]", r"its data is \[1\]"),
            ("step", "{}, {}", "Extra data"),
        ],
    )
    def test_an_event_that_is_none(self, ledger: Ledger, path: Path, kind: str, data: str, why: str) -> None:
        ledger.append(steps(1, 2))
        database = sqlite3.connect(path, timeout=10)
        with database:
            database.execute("INSERT INTO events(at_s, kind, data) VALUES (1, ?, ?)", (kind, data))
        database.close()
        with pytest.raises(MalformedFile, match=f"event 3 cannot be read: {why}"):
            list(ledger.events())

    @pytest.mark.parametrize(
        ("at_s", "machine", "why"),
        [
            (1e30, None, r"its time is 1e\+30"),
            (float("inf"), None, "its time is inf"),
            ("abc", None, "its time is 'abc'"),
            (b"x", None, "its time is b'x'"),
            (1.0, b"m", "its machine is b'm'"),
        ],
    )
    def test_an_event_with_another_type_or_time(
        self, ledger: Ledger, path: Path, at_s: object, machine: object, why: str
    ) -> None:
        database = sqlite3.connect(path, timeout=10)
        with database:
            database.execute(
                "INSERT INTO events(at_s, kind, machine, data) VALUES (?, 'step', ?, '{}')", (at_s, machine)
            )
        database.close()
        with pytest.raises(MalformedFile, match=f"event 1 cannot be read: {why}"):
            list(ledger.events())

    @pytest.mark.parametrize("write", [False, True])
    @pytest.mark.parametrize(
        ("table", "instead"),
        [
            ("events", "CREATE VIEW events AS WITH RECURSIVE c(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM c) "
             "SELECT id, 1.0 AS at_s, 'step' AS kind, NULL AS machine, '{}' AS data FROM c"),
            ("facts", "CREATE VIEW facts AS WITH RECURSIVE c(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM c) "
             "SELECT 'a' || id AS name, 'b' AS value FROM c"),
            ("facts", "CREATE TABLE facts(name TEXT, value AS (zeroblob(1000000000)))"),
            ("facts", None),
        ],
    )  # fmt: skip
    def test_tables_that_are_none(
        self, ledger: Ledger, path: Path, table: str, instead: str | None, write: bool
    ) -> None:
        ledger.close()
        database = sqlite3.connect(path)
        with database:
            database.execute(f"DROP TABLE {table}")
            if instead is not None:
                database.execute(instead)
        database.close()
        with pytest.raises(MalformedFile, match=f"its {table} are not a table"):
            Ledger.open(path, write=write)

    def test_a_lock_that_is_not_a_file(self, ledger: Ledger, path: Path) -> None:
        ledger.close()
        lock = path.with_name("ledger.sqlite.lock")
        lock.unlink()
        os.mkfifo(lock, 0o600)
        assert not being_written(path)
        with pytest.raises(LedgerError, match="is not a regular file"):
            Ledger.open(path, write=True)


def test_the_file_is_what_the_format_says(ledger: Ledger, path: Path) -> None:
    ledger.append([Event(at_s=1.5, kind="step", machine="worker/0", data={"step": 1})])
    ledger.close()
    database = sqlite3.connect(path)
    try:
        assert database.execute("PRAGMA user_version").fetchone() == (1,)
        assert database.execute("PRAGMA application_id").fetchone() == (0x44564D4C,)
        assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert database.execute("SELECT * FROM events").fetchall() == [(1, 1.5, "step", "worker/0", '{"step": 1}')]
        facts = dict(database.execute("SELECT name, value FROM facts"))
    finally:
        database.close()
    assert (facts["format"], facts["run"]) == ("deepvm-ledger/1", "one")
    assert json.loads(facts["plan"])["format"] == "deepvm-plan/1"
    assert json.loads(facts["cluster"])["machines"][0]["usd_per_hour"] == 0.1578


def test_a_ledger_that_was_closed_says_so(ledger: Ledger, path: Path) -> None:
    ledger.append(steps(1, 1))
    ledger.close()
    with pytest.raises(LedgerError) as caught:
        list(ledger.events())
    assert str(caught.value) == f"{path} is not open any more: Cannot operate on a closed database."


def test_values_inside_of_others_that_are_not_finite_are_missing_too(ledger: Ledger) -> None:
    nested = {"a": [1.5, math.inf, {"b": -math.inf}], "c": {"d": (math.nan, "text", None, True, 3)}}
    ledger.append([Event(at_s=1.0, kind="save", machine="worker/0", data=nested)])
    (found,) = ledger.events()
    assert found.data == {"a": [1.5, None, {"b": None}], "c": {"d": [None, "text", None, True, 3]}}
