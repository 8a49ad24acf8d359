"""``deepvm-fetch`` as a process: what it says, what it refuses, what it leaves."""

from __future__ import annotations

import dataclasses
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deepvm.errors import AccessDenied, Corrupt, StoreUnavailable
from deepvm.fetch import segment, segment_files
from deepvm.fetch.fetched_store import fetched_before
from deepvm.fetch.segment_reader import find_segment
from deepvm.fetch.segment_writer import SegmentWriter
from deepvm.memnode import MemoryNode
from deepvm.store import open_store
from tests.support.fetcher import Fetcher, opened, restore, save
from tests.support.waiting import wait_until

Fetch = Callable[..., Fetcher]


def test_it_loads_no_torch_and_nothing_else_that_is_heavy() -> None:
    code = "import sys, deepvm.fetch.command; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    heavy = {"torch", "numpy", "scipy", "rich", "typer", "matplotlib", "obstore", "http", "asyncio", "platformdirs"}
    assert not heavy & set(done.stdout.split())


def test_only_its_user_can_read_what_it_fetched(url: str, run: str, fetch: Fetch) -> None:
    save(url, run, 1)
    fetcher = fetch(url)
    fetcher.result()
    assert stat.S_IMODE(fetcher.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(fetcher.path.parent.stat().st_mode) == 0o700
    assert f"deepvm-{os.getuid()}/{run}" in str(fetcher.path)


def test_a_segment_that_others_could_have_written_is_not_used(
    url: str, run: str, fetch: Fetch, caplog: pytest.LogCaptureFixture
) -> None:
    truth = save(url, run, 1)
    fetcher = fetch(url)
    fetcher.result()
    fetcher.path.chmod(0o666)
    assert restore(url, run) == (1, truth[1])
    assert "is not this user's alone" in caplog.text
    fetcher.path.chmod(0o600)


def test_a_folder_that_others_could_write_to_is_refused(
    url: str, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_files, "SHARED_MEMORY", tmp_path)
    folder = tmp_path / f"deepvm-{os.getuid()}"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    with pytest.raises(AccessDenied, match="not this user's alone"):
        segment_files.make_folder(folder)


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder in a /dev/shm of this test's own, which does not exist yet."""
    memory = tmp_path / "shm"
    memory.mkdir()
    monkeypatch.setattr(segment_files, "SHARED_MEMORY", memory)
    return segment_files.shared_folder()


def _make_private_file(path: Path, data: bytes = b"secret") -> Path:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.write_bytes(data)
    path.chmod(0o600)
    _make_old(path)
    return path


def test_a_link_in_shared_memory_is_not_followed_to_the_user_s_own_files(
    shared: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = _make_private_file(tmp_path / "home" / "id_ed25519")
    old_segment = _make_private_file(tmp_path / "home" / "old", segment.MAGIC)
    shared.symlink_to(key.parent)
    with pytest.raises(AccessDenied, match="not this user's alone"):
        find_segment("job")
    assert fetched_before([], "job") is None
    assert "is not used" in caplog.text
    segment_files.remove_orphans(but="job")
    segment_files.remove(shared / "old")
    for name in ("job", "old"):
        with pytest.raises(AccessDenied, match="not this user's alone"):
            SegmentWriter(shared / name)
    assert key.read_bytes() == b"secret"
    assert old_segment.exists()


def test_only_segments_are_removed_from_the_user_s_folder(shared: Path) -> None:
    note = _make_private_file(shared / "note")
    orphan, empty = _make_private_file(shared / "orphan", segment.MAGIC), _make_private_file(shared / "empty", b"")
    assert find_segment("job") is None
    assert note.exists()
    assert not orphan.exists()
    assert not empty.exists()


def test_a_file_that_is_not_a_segment_is_neither_read_nor_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = _make_private_file(tmp_path / "note")
    monkeypatch.setenv(segment.PATH_VARIABLE, str(note))
    with pytest.raises(Corrupt):
        find_segment("job")
    with pytest.raises(StoreUnavailable, match="is not a segment"):
        SegmentWriter(note)
    segment_files.remove(note)
    assert note.read_bytes() == b"secret"


def test_no_checkpoint_is_nothing_to_fetch_and_no_failure(url: str, run: str, fetch: Fetch) -> None:
    fetcher = fetch(url)
    assert fetcher.result()["step"] is None
    code, said = fetcher.end()
    assert (code, "nothing to fetch" in said) == (0, True)


def test_a_step_that_is_asked_for_is_fetched_or_missed_aloud(url: str, run: str, fetch: Fetch) -> None:
    truth = save(url, run, 1, 2)
    fetcher = fetch(url, "--step", "5")
    code, said = fetcher.end()
    assert code == 1
    assert f"no store has step 5 of run {run}" in said
    assert fetch(url, "--step", "1").result()["step"] == 1
    assert restore(url, run, step=1) == (1, truth[1])


def test_the_wrong_token_fails_at_once_and_leaves_nothing(
    node_of: Callable[..., MemoryNode], run: str, fetch: Fetch, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = node_of(token="the right one")
    url = f"memory://{node.address}"
    monkeypatch.setenv("DEEPVM_TOKEN", "the right one")
    save(url, run, 1)
    fetcher = fetch(url, token="a wrong one")
    code, said = fetcher.end()
    assert code == 1
    assert "token" in said
    assert not fetcher.path.exists()
    assert fetch(url, token="the right one").result()["step"] == 1


def test_too_little_room_is_reported_before_anything_is_read(run: str, fetch: Fetch, tmp_path: Path) -> None:
    truth = save(f"file://{tmp_path}", run, 1)
    store = open_store(f"file://{tmp_path}")
    manifest = store.manifest(run, 1)
    store.close()
    huge = 2**42  # a hole in a file, as large as no memory
    chunks = huge // (4 * 2**20)
    claimed = dataclasses.replace(manifest, step=2, size_bytes=huge, chunk_bytes=4 * 2**20, digests=[0] * chunks)
    (tmp_path / run / "step-000000000002.json").write_bytes(claimed.to_bytes())
    with (tmp_path / run / "step-000000000002.safetensors").open("wb") as file:
        file.truncate(huge)
    fetcher = fetch(f"file://{tmp_path}")
    code, said = fetcher.end()
    assert code == 1
    assert "has no room" in said
    assert "restores from its stores as usual" in said
    assert not fetcher.path.exists()
    for path in (tmp_path / run).glob("step-000000000002*"):
        path.unlink()
    assert restore(f"file://{tmp_path}", run) == (1, truth[1])


def test_what_nobody_takes_goes_when_its_time_is_up(url: str, run: str, fetch: Fetch) -> None:
    save(url, run, 1)
    fetcher = fetch(url, "--keep-s", "300ms")
    fetcher.result()
    assert fetcher.path.exists()
    assert fetcher.end()[0] == 0
    assert not fetcher.path.exists()


def test_one_fetcher_at_a_time_and_a_dead_one_s_place_is_taken(url: str, run: str, fetch: Fetch) -> None:
    save(url, run, 1)
    first = fetch(url)
    first.result()
    code, said = fetch(url).end()
    assert code == 1
    assert "another fetcher" in said
    first.kill()
    assert first.path.exists()
    assert fetch(url).result()["step"] == 1
    found = opened(run)
    assert found.read_head().whole_s > 0
    found.close()


def test_the_next_fetcher_removes_what_a_killed_one_of_another_run_left(url: str, run: str, fetch: Fetch) -> None:
    save(url, run, 1)
    killed = fetch(url)
    killed.result()
    killed.kill()
    _make_old(killed.path)
    assert killed.path.exists()
    other = Fetcher(f"{run}-other", url)
    try:
        wait_until(lambda: not killed.path.exists(), "the removal")
    finally:
        other.process.terminate()
        other.end()


def test_a_trainer_removes_what_killed_fetchers_left(url: str, run: str, fetch: Fetch) -> None:
    save(url, run, 1)
    save(url, f"{run}-living", 1)
    killed, living = fetch(url), Fetcher(f"{run}-living", url)
    try:
        for fetcher in (killed, living):
            fetcher.result()
        killed.kill()
        for fetcher in (killed, living):
            _make_old(fetcher.path)
        assert find_segment(f"{run}-other") is None
        assert not killed.path.exists()
        assert living.path.exists()
    finally:
        living.process.terminate()
        living.end()


def test_a_segment_whose_fetcher_was_killed_before_it_chose_goes_with_its_trainer(run: str) -> None:
    filling = SegmentWriter(segment_files.default_path(run))
    path = filling.path
    os.close(filling._fd)  # as if it was killed
    assert path.exists()
    assert find_segment(run) is None
    assert not path.exists()


def _make_old(path: Path) -> None:
    os.utime(path, (time.time() - 60, time.time() - 60))


@pytest.mark.parametrize(
    "words", [["nonsense://x"], ["--keep-s", "0", "file:///nowhere"], ["--run", "../up", "file:///nowhere"], []]
)
def test_bad_usage_is_reported_with_exit_code_2(run: str, fetch: Fetch, words: list[str]) -> None:
    assert fetch(*words).end()[0] == 2


def test_golden_bytes_of_a_segment_s_head() -> None:
    head = segment.Head(
        state=segment.State.FILLING, pid=7, pid_started_ticks=8, about_bytes=100, chunks=3, data_offset=2 * 2**20,
        size_bytes=10_000_000, started_s=1.5, chosen_s=2.0, whole_s=0.0,
    )  # fmt: skip
    golden = (
        "44564d5345473100 02000000 02000000 0700000000000000 0800000000000000 6400000000000000 0300000000000000 "
        "0000200000000000 8096980000000000 000000000000f83f 0000000000000040 0000000000000000"
    )
    assert head.to_bytes().hex() == golden.replace(" ", "")
    assert segment.Head.from_bytes(head.to_bytes()) == head


@pytest.mark.parametrize(
    ("offset", "value", "problem"),
    [(0, b"X", "begins with"), (8, b"\x01", "version 1"), (12, b"\x09", "state"), (48, b"\x01", "puts its data")],
)
def test_a_head_that_is_not_one_is_refused(offset: int, value: bytes, problem: str) -> None:
    head = segment.Head(state=segment.State.WHOLE, pid=7, pid_started_ticks=8, data_offset=2 * 2**20)
    data = bytearray(head.to_bytes())
    data[offset : offset + 1] = value[:1]
    with pytest.raises(Corrupt, match=problem):
        segment.Head.from_bytes(bytes(data))
