"""What is said to be on the disk is there after any end of the node, and nothing else is."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest

from deepvm.errors import AccessDenied
from deepvm.memnode.monitoring.log import Log
from deepvm.memnode.writeback.spill import Spill
from deepvm.protocol.frames import Kind
from deepvm.store.files.store import FileStore
from tests.support.memnode.client import BLOCK, Client, chunks_of, content, digest_of, manifest_of
from tests.support.small_disk import fill
from tests.support.waiting import wait_until

SIZE = 3 * BLOCK + 100
STEP_1, STEP_2 = "step-000000000001", "step-000000000002"


def spilled(client: Client, step: int) -> bool:
    return client.steps().get(step) == "spilled"


def save_and_spill(client: Client, step: int, data: bytes, **fields: Any) -> None:
    client.begin(step, len(data))
    client.save_chunks(step, data)
    client.publish(manifest_of(data, client.run, step, **fields))
    wait_until(lambda: spilled(client, step))


def files_in(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()} - {".node.lock"}


# --- durable is durable -------------------------------------------------------------------------------------------


def test_a_disk_that_was_full_when_a_session_began_loses_nothing_that_is_called_spilled(
    start_node: Any, connect: Any, small_disk: Path
) -> None:
    first = start_node(spill=small_disk)
    filler = fill(small_disk)
    client = connect(first.address, "run")
    client.save(1, content(1, SIZE))
    wait_until(lambda: client.status()["spill_failures"] >= 1)
    assert client.steps() == {1: "remote"}
    filler.unlink()
    wait_until(lambda: spilled(client, 1), timeout_s=20)
    save_and_spill(client, 2, content(2, SIZE))
    first.stop()

    again = connect(start_node(spill=small_disk).address, "run", session="s2")
    assert again.steps() == {1: "spilled", 2: "spilled"}
    assert again.read(1) == content(1, SIZE)
    save_and_spill(again, 3, content(3, SIZE))
    assert again.steps() == {2: "spilled", 3: "spilled"}


def test_a_session_that_could_not_be_written_down_is_written_before_its_first_spill(
    start_node: Any, connect: Any, small_disk: Path
) -> None:
    first = start_node(spill=small_disk)
    client = connect(first.address, "run", session="old")
    save_and_spill(client, 1, content(1, SIZE))
    filler = fill(small_disk)
    client = connect(first.address, "run", session="new")
    filler.unlink()
    save_and_spill(client, 2, content(2, SIZE))
    first.stop()
    with pytest.raises(AccessDenied, match="newer session"):
        connect(start_node(spill=small_disk).address, "run", session="old")


def test_a_disk_that_does_not_answer_is_not_taken_for_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spill = Spill(tmp_path / "spill", keep=2, log=Log(None))
    assert spill.is_lost() is False
    (tmp_path / "spill").rename(tmp_path / "moved")
    assert spill.is_lost() is True
    monkeypatch.setattr("deepvm.memnode.writeback.spill.os.stat", _broken)
    assert spill.is_lost() is False
    monkeypatch.undo()
    (tmp_path / "spill").mkdir()
    (tmp_path / "spill" / ".lock").write_text("")
    assert spill.is_lost() is True
    spill.close()


def _broken(_: object) -> None:
    raise OSError(errno.EIO, "Input/output error")


def test_what_was_not_loaded_is_never_pruned_nor_written_over(start_node: Any, connect: Any, tmp_path: Path) -> None:
    first = start_node(spill=tmp_path)
    save_and_spill(connect(first.address, "lost"), 1, content(1, SIZE))
    save_and_spill(connect(first.address, "half"), 1, content(1, SIZE))
    first.stop()
    (tmp_path / "lost" / "run.json").unlink()
    (tmp_path / "half" / f"{STEP_1}.json").write_text("{")

    told = io.StringIO()
    node = start_node(spill=tmp_path, log=Log(told))
    lost = connect(node.address, "lost", key="another")
    for step in (1, 2, 3, 4):
        save_and_spill(lost, step, content(10 + step, SIZE))
    half = connect(node.address, "half", session="s2")
    for step in (2, 3, 4):
        save_and_spill(half, step, content(step, SIZE))
    kept = tmp_path / ".set-aside" / "lost-1" / f"{STEP_1}.safetensors"
    assert kept.read_bytes() == content(1, SIZE)
    assert kept.with_suffix(".json").exists()
    assert (tmp_path / "half" / f"{STEP_1}.safetensors").read_bytes() == content(1, SIZE)
    node.stop()
    (tmp_path / "lost" / "run.json").unlink()
    save_and_spill(connect(start_node(spill=tmp_path).address, "lost", key="a third"), 9, content(1, SIZE))
    assert sorted(path.name for path in (tmp_path / ".set-aside").iterdir()) == ["lost-1", "lost-2"]
    events = [json.loads(line) for line in told.getvalue().splitlines()]
    assert any(event["event"] == "set aside" and event["run"] == "lost" for event in events)
    assert any(event["level"] == "error" and event.get("run") == "half" and event["step"] == 1 for event in events)


def test_a_clock_that_was_set_back_prunes_nothing_newer(start_node: Any, connect: Any, tmp_path: Path) -> None:
    first = start_node(spill=tmp_path)
    client = connect(first.address, "run")
    save_and_spill(client, 1, content(1, SIZE), created_s=5000.0)
    save_and_spill(client, 2, content(2, SIZE), created_s=1000.0)
    first.stop()
    client = connect(start_node(spill=tmp_path).address, "run", session="s2")
    save_and_spill(client, 3, content(3, SIZE), created_s=1001.0)
    assert client.steps() == {2: "spilled", 3: "spilled"}


def test_a_copy_made_again_after_the_clock_was_set_back_is_not_taken_for_the_oldest(
    start_node: Any, connect: Any
) -> None:
    client = connect(start_node().address, "run")
    for step, created_s in ((1, 5000.0), (2, 5001.0)):
        client.begin(step, SIZE)
        client.save_chunks(step, content(step, SIZE))
        client.publish(manifest_of(content(step, SIZE), "run", step, created_s=created_s))
    client.begin(3, SIZE, repair=True)
    client.save_chunks(3, content(3, SIZE))
    client.publish(manifest_of(content(3, SIZE), "run", 3, created_s=1000.0))
    assert list(client.steps()) == [2, 3]


# --- no file stops a start ----------------------------------------------------------------------------------------


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document.replace('"facts": {}', f'"facts": {{"x": {DEEP}}}'),
        lambda document: document.replace('"facts": {}', f'"facts": {{"x": {"[" * 940 + "]" * 940}}}'),
        lambda document: document.replace('"facts": {}', '"facts": [1]'),
        lambda document: document.replace('"facts": {}', '"facts": null'),
        lambda document: document.replace('"nodes": []', '"nodes": [[]]'),
        lambda document: document.replace('"replicas": 1', '"replicas": "x"'),
        lambda document: document.replace('"created_s": 1.0', '"created_s": 1e999'),
        lambda document: "\ud800".encode("utf-8", "surrogatepass"),
        lambda document: DEEP,
        lambda document: "",
    ],
)
def test_no_manifest_keeps_a_node_from_starting(start_node: Any, connect: Any, tmp_path: Path, change: Any) -> None:
    first = start_node(spill=tmp_path)
    client = connect(first.address, "run")
    save_and_spill(client, 1, content(1, SIZE))
    save_and_spill(client, 2, content(2, SIZE))
    first.stop()
    path = tmp_path / "run" / f"{STEP_1}.json"
    bad = change(path.read_text())
    path.write_bytes(bad if isinstance(bad, bytes) else bad.encode())
    client = connect(start_node(spill=tmp_path).address, "run", session="s2")
    assert client.read(2) == content(2, SIZE)
    save_and_spill(client, 3, content(3, SIZE))
    assert path.exists() or not spilled(client, 1)


RUN_FILE = {"format": "deepvm-run/1", "run": "odd", "verifier": "00" * 32, "session": None, "past_sessions": []}


@pytest.mark.parametrize(
    "text",
    [
        DEEP, "[]", "{}", '{"format": "deepvm-run/1"}', "x" * 3_000_000, "\x00",
        *(json.dumps({**RUN_FILE, **change}) for change in (
            {"run": "another"}, {"run": "../odd"}, {"run": 1}, {"verifier": "00"}, {"verifier": "no digits"},
            {"verifier": 0}, {"session": 1}, {"past_sessions": [1]}, {"past_sessions": {}}, {"order": ["1"]},
        )),
    ],
)  # fmt: skip
def test_no_run_file_keeps_a_node_from_starting(start_node: Any, connect: Any, tmp_path: Path, text: str) -> None:
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "run.json").write_text(text)
    (tmp_path / "folder" / "run.json").mkdir(parents=True)
    (tmp_path / ".parts").write_text("not a folder")
    node = start_node(spill=tmp_path)
    assert node.runs.find("odd") is None
    client = connect(node.address, "run")
    save_and_spill(client, 1, content(1, SIZE))
    assert (tmp_path / "odd" / "run.json").read_text() == text


@pytest.mark.timeout(20)  # an open of a FIFO waits for ever
@pytest.mark.parametrize(
    "name", ["run.json", f"{STEP_2}.json", f"{STEP_2}.safetensors", f".{STEP_2}.json.tmp-abc", ".step-9.json.tmp-abc"]
)
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/tty")], ids=["fifo", "device"])
def test_nothing_that_is_no_plain_file_keeps_a_node_from_starting(
    start_node: Any, connect: Any, tmp_path: Path, name: str, make: Any
) -> None:
    first = start_node(spill=tmp_path)
    bad = connect(first.address, "bad")
    for step in (1, 2):
        save_and_spill(bad, step, content(step, SIZE))
    save_and_spill(connect(first.address, "good"), 1, content(1, SIZE))
    first.stop()
    path = tmp_path / "bad" / name
    if name.startswith("."):
        (tmp_path / "bad" / f"{STEP_2}.json").unlink()  # so that the start looks whether it can be finished
    path.unlink(missing_ok=True)
    make(path)
    told = io.StringIO()
    second = start_node(spill=tmp_path, log=Log(told))
    assert connect(second.address, "good", session="s2").read(1) == content(1, SIZE)
    if name != "run.json":
        assert connect(second.address, "bad", session="s2").read(1) == content(1, SIZE)
    assert path.is_symlink() or path.exists()
    assert str(path) in told.getvalue() or name.startswith(".step-9")


def test_a_strange_file_does_not_keep_what_is_half_written_beside_it(
    start_node: Any, connect: Any, tmp_path: Path
) -> None:
    first = start_node(spill=tmp_path)
    save_and_spill(connect(first.address, "run"), 1, content(1, SIZE))
    first.stop()
    half = tmp_path / "run" / f"{STEP_2}.safetensors"
    half.write_bytes(b"half")
    (tmp_path / "run" / ".step-000000000003.json.tmp-abc").symlink_to("/dev/tty")
    start_node(spill=tmp_path)
    assert not half.exists()


def test_more_runs_than_the_limit_are_all_served_again(start_node: Any, connect: Any, tmp_path: Path) -> None:
    first = start_node(spill=tmp_path, limits={"runs": 3})
    for name in "abc":
        save_and_spill(connect(first.address, name), 1, content(1, SIZE))
    first.stop()
    second = start_node(spill=tmp_path, limits={"runs": 2})
    assert connect(second.address).ask(Kind.RUNS)[1]["runs"] == ["a", "b", "c"]


# --- what nothing owns --------------------------------------------------------------------------------------------


def half_written(folder: Path) -> dict[str, Path]:
    """What a node leaves that is killed at one moment or another."""
    left = {
        "bytes without a manifest": folder / f"{STEP_2}.safetensors",
        "bytes in the writing": folder / ".step-000000000003.safetensors.tmp-1-abcd",
        "a manifest cut off": folder / ".step-000000000004.json.tmp-1-abcd",
        "a run file in the writing": folder / ".run.json.tmp",
    }
    for path in left.values():
        path.write_bytes(b'{"format')
    return left


def test_a_start_removes_what_nothing_owns_and_nothing_else(start_node: Any, connect: Any, tmp_path: Path) -> None:
    first = start_node(spill=tmp_path)
    save_and_spill(connect(first.address, "run"), 1, content(1, SIZE))
    first.stop()
    whole = files_in(tmp_path)
    (tmp_path / ".parts" / "run").mkdir(parents=True)
    left = [*half_written(tmp_path / "run").values(), *half_written(tmp_path / ".parts" / "run").values()]
    (tmp_path / "begun").mkdir()
    strange = tmp_path / "notes" / f"{STEP_2}.safetensors"
    strange.parent.mkdir()
    strange.write_bytes(b"of somebody else")
    node = start_node(spill=tmp_path)
    assert not [path for path in left if path.exists()]
    assert files_in(tmp_path) == whole | {f"notes/{STEP_2}.safetensors"}
    assert not (tmp_path / "begun").exists()
    assert connect(node.address, "run", write=False).read(1) == content(1, SIZE)


@pytest.mark.parametrize("renamed", [False, True])
def test_a_start_finishes_a_spill_that_lacked_only_its_last_rename(
    start_node: Any, connect: Any, tmp_path: Path, renamed: bool
) -> None:
    first = start_node(spill=tmp_path)
    client = connect(first.address, "run")
    save_and_spill(client, 1, content(1, SIZE))
    save_and_spill(client, 2, content(2, SIZE))
    first.stop()
    folder = tmp_path / "run"
    (folder / f"{STEP_2}.json").rename(folder / f".{STEP_2}.json.tmp-9-ffff")
    if not renamed:  # step 2 was saved again: the bytes under its name are the earlier ones
        shutil.copy(folder / f"{STEP_2}.safetensors", folder / f".{STEP_2}.safetensors.tmp-9-ffff")
        (folder / f"{STEP_2}.safetensors").write_bytes(content(7, SIZE))
    client = connect(start_node(spill=tmp_path).address, "run", write=False)
    assert client.steps() == {1: "spilled", 2: "spilled"}
    assert client.read(2) == content(2, SIZE)
    assert not [name for name in files_in(tmp_path) if "tmp" in name]


# --- a flipped bit stays away -------------------------------------------------------------------------------------


def test_a_flipped_bit_does_not_come_back_with_a_recycled_file(start_node: Any, connect: Any, tmp_path: Path) -> None:
    client = connect(start_node(spill=tmp_path, spill_keep=1).address, "run")
    data = [content(step, BLOCK) + content(99, 3 * BLOCK) for step in range(6)]
    save_and_spill(client, 0, data[0])
    save_and_spill(client, 1, data[1])  # step 0's file is now the one to write over
    path = next((tmp_path / "run").glob(".step-*.tmp-*"))
    times = os.stat(path)
    with path.open("r+b") as file:
        file.seek(2 * BLOCK + 77)
        file.write(bytes([content(99, 3 * BLOCK)[BLOCK + 77] ^ 4]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    for step in range(2, 6):
        save_and_spill(client, step, data[step])
        kept = (tmp_path / "run" / f"step-{step:012d}.safetensors").read_bytes()
        assert kept == data[step], f"step {step}"


def test_a_bit_that_flips_under_a_checkpoint_does_not_spread_to_later_ones(
    start_node: Any, connect: Any, tmp_path: Path
) -> None:
    client = connect(start_node(spill=tmp_path, spill_keep=2).address, "run")
    data = [content(step, BLOCK) + content(99, 3 * BLOCK) for step in range(10)]
    save_and_spill(client, 0, data[0])
    path = tmp_path / "run" / "step-000000000000.safetensors"
    times = os.stat(path)
    with path.open("r+b") as file:
        file.seek(2 * BLOCK + 77)
        file.write(bytes([content(99, 3 * BLOCK)[BLOCK + 77] ^ 4]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    for step in range(1, 10):
        save_and_spill(client, step, data[step])
        assert (tmp_path / "run" / f"step-{step:012d}.safetensors").read_bytes() == data[step], f"step {step}"


# --- for the owner only -------------------------------------------------------------------------------------------


def test_nobody_else_reads_what_a_node_spilled(start_node: Any, connect: Any, tmp_path: Path) -> None:
    old = os.umask(0o000)
    try:
        node = start_node(spill=tmp_path)
        client = connect(node.address, "run")
        save_and_spill(client, 1, content(1, SIZE))
        data = content(2, 4 * BLOCK)
        client.begin(2, len(data), nodes=2, node_index=1, replicas=1)
        for chunk in (1, 3):
            client.put(2, chunk, chunks_of(data)[chunk])
        client.publish(manifest_of(data, "run", 2, nodes=("a:1", node.address)), node_index=1)
        wait_until(lambda: spilled(client, 2))
    finally:
        os.umask(old)
    for folder in (tmp_path / "run", tmp_path / ".parts", tmp_path / ".parts" / "run"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder
        for path in folder.iterdir():
            assert path.is_dir() or stat.S_IMODE(path.stat().st_mode) == 0o600, path
    node.stop()
    (tmp_path / ".parts").chmod(0o755)  # as an earlier version left it
    start_node(spill=tmp_path)
    assert stat.S_IMODE((tmp_path / ".parts").stat().st_mode) == 0o700


def test_folders_are_on_the_disk_before_what_is_in_them(
    start_node: Any, connect: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    sync = os.fsync

    def noted(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        sync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    client = connect(start_node(spill=tmp_path).address, "run")
    save_and_spill(client, 1, content(1, SIZE))
    assert {str(tmp_path), str(tmp_path / "run")} <= set(synced)
    assert synced.index(str(tmp_path)) < next(i for i, path in enumerate(synced) if ".step-" in path)
    assert FileStore(tmp_path).steps("run") == [1]
    assert digest_of((tmp_path / "run" / f"{STEP_1}.safetensors").read_bytes()) == digest_of(content(1, SIZE))
