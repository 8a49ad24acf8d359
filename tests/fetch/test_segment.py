"""The segment: its bytes, what a reader refuses, whose files are used and removed, and a machine without room."""

from __future__ import annotations

import errno
import json
import os
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepvm.errors import AccessDenied, Corrupt, NotFound, StoreError, StoreUnavailable
from deepvm.fetch import clock, segment, segment_files, segment_reader, segment_writer
from deepvm.fetch import pull as pull_module
from deepvm.fetch.fetched_store import FetchedStore, fetched_before
from deepvm.fetch.pull import Unwanted, pull
from deepvm.fetch.segment import ALIGN_BYTES, PAGE_BYTES, About, Head, State
from deepvm.fetch.segment_reader import SegmentReader, find_segment, local_ranks
from deepvm.fetch.segment_writer import SegmentFull, SegmentWriter
from deepvm.store.base import Manifest
from deepvm.store.files.store import FileStore
from tests.support.store.checkpoints import CHUNK, manifest_of, payload, save, spans
from tests.support.store.places import FilePlace

DATA = payload(3 * CHUNK + 7)
MANIFEST = manifest_of(DATA, "run-a", 4)


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Shared memory of this test's own; no rank, and no segment that is named in the environment."""
    monkeypatch.setattr(segment_files, "SHARED_MEMORY", tmp_path)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", segment.PATH_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    return segment_files.default_path("run-a")


def filled(path: Path, *, whole: bool = True, store: str = "file:///far") -> SegmentWriter:
    writer = SegmentWriter(path)
    writer.choose(MANIFEST, store, ("step 5: gone",))
    for chunk, (offset, length) in enumerate(spans(DATA)):
        if whole or chunk != 1:
            writer.put(chunk, offset, memoryview(DATA)[offset : offset + length])
    if whole:
        writer.finish()
    return writer


def reader(path: Path) -> SegmentReader:
    found = find_segment("run-a")
    assert found is not None
    assert found.path == path
    return found


# --- the bytes -------------------------------------------------------------------------------------------------------


def test_a_segment_is_these_bytes(path: Path) -> None:
    writer = filled(path)
    data = path.read_bytes()
    magic, version, state, pid, ticks, about, chunks, at, size, *times = struct.unpack_from("<8sII6Q3d", data)
    assert (magic, version, state, pid, chunks, at, size) == (
        b"DVMSEG1\0", 2, 3, os.getpid(), 4, ALIGN_BYTES, len(DATA),
    )  # fmt: skip
    assert ticks > 0
    assert 0 < times[0] <= times[1] <= times[2]
    document = json.loads(data[PAGE_BYTES : PAGE_BYTES + about])
    assert (document["store"], document["passed_over"]) == ("file:///far", ["step 5: gone"])
    assert document["manifest"] == MANIFEST.to_bytes().decode()
    assert data[PAGE_BYTES + about : PAGE_BYTES + about + 5] == b"\1\1\1\1\0"
    assert data[2047:PAGE_BYTES] == bytes(2049)
    assert data[at:] == DATA
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    writer.give_up()
    writer.give_up()  # a second time is nothing
    assert not path.parent.exists()


@pytest.mark.parametrize(("about", "chunks", "at"), [(0, 1, 1), (ALIGN_BYTES - PAGE_BYTES - 4, 4, 1), (10**7, 7, 5)])
def test_the_data_begin_at_a_huge_page_behind_all_else(about: int, chunks: int, at: int) -> None:
    assert segment.data_offset(about, chunks) == at * ALIGN_BYTES
    assert segment.data_offset(ALIGN_BYTES - PAGE_BYTES - 4, 5) == 2 * ALIGN_BYTES


HEAD = Head(
    state=State.WHOLE, pid=1, pid_started_ticks=2, about_bytes=100, chunks=4, data_offset=ALIGN_BYTES, size_bytes=9,
    started_s=1.5, chosen_s=2.5, whole_s=3.5,
)  # fmt: skip


def test_a_header_is_read_as_it_was_written() -> None:
    assert Head.from_bytes(HEAD.to_bytes()) == HEAD
    fits = replace(HEAD, about_bytes=ALIGN_BYTES - PAGE_BYTES - 4)
    assert Head.from_bytes(fits.to_bytes()).flags_offset == ALIGN_BYTES - 4
    most = replace(HEAD, about_bytes=segment.MOST_ABOUT_BYTES, data_offset=256 * ALIGN_BYTES)
    assert Head.from_bytes(most.to_bytes()) == most
    anything = replace(HEAD, state=State.CHOOSING, data_offset=7)
    assert Head.from_bytes(anything.to_bytes()) == anything


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"about_bytes": segment.MOST_ABOUT_BYTES + 1, "data_offset": 256 * ALIGN_BYTES}, "puts its data"),
        ({"data_offset": ALIGN_BYTES + 1}, "puts its data"),
        ({"data_offset": 0}, "puts its data"),
        ({"about_bytes": ALIGN_BYTES - PAGE_BYTES - 3}, "puts its data"),
    ],
)
def test_a_header_that_cannot_be_is_refused(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(Corrupt, match=problem):
        Head.from_bytes(replace(HEAD, **change).to_bytes())


def test_other_bytes_are_no_header() -> None:
    good = HEAD.to_bytes()
    for data, problem in (
        (good[:-1], "no header yet"),
        (b"X" + good[1:], "begins with"),
        (good[:8] + b"\1" + good[9:], "version 1; this reads version 2"),
        (good[:12] + b"\x09" + good[13:], "an unknown state 9"),
    ):
        with pytest.raises(Corrupt, match=problem):
            Head.from_bytes(data)


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("store", 5, "store is 5"),
        ("store", "x" * 4097, "store is"),
        ("passed_over", "all", "passed_over is"),
        ("passed_over", [5], "passed_over has 5, which is not text"),
        ("passed_over", ["x"] * 10_001, "passed_over is"),
        ("manifest", {}, "manifest is .*, not text"),
    ],
)
def test_a_description_is_checked_before_it_is_used(field: str, value: object, problem: str) -> None:
    about = About(store="x" * 4096, passed_over=("a",) * 10_000, manifest=MANIFEST)
    assert About.from_bytes(about.to_bytes()).passed_over == about.passed_over
    document = {**json.loads(about.to_bytes()), field: value}
    with pytest.raises(Corrupt, match=f"the description in a fetched segment cannot be read: .*{problem}"):
        About.from_bytes(json.dumps(document).encode())
    with pytest.raises(Corrupt, match="is missing"):
        About.from_bytes(json.dumps({name: value for name, value in document.items() if name != field}).encode())


# --- readers ---------------------------------------------------------------------------------------------------------


def test_a_whole_segment_is_read_with_every_chunk(path: Path) -> None:
    writer = filled(path)
    found = reader(path)
    assert found.chunks_present == 4
    assert found.about.passed_over == ("step 5: gone",)
    into = bytearray(10)
    found.read(CHUNK - 3, memoryview(into))
    assert into == DATA[CHUNK - 3 : CHUNK + 7]
    found.release()
    assert not path.exists()
    assert not writer.is_wanted()
    found.close()
    writer.give_up()


def test_the_last_rank_of_a_machine_removes_the_segment(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = filled(path)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for rank in (1, 0):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        found = reader(path)
        found.release()
        assert path.exists() == (rank == 1)
        found.close()
    writer.give_up()


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, (0, 1)),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, (1, 2)),
        ({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, (0, 1)),
        ({"LOCAL_RANK": "-1", "LOCAL_WORLD_SIZE": "2"}, (0, 1)),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2048"}, (0, 2048)),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2049"}, (0, 1)),
        ({"LOCAL_RANK": "zero"}, (0, 1)),
        ({"LOCAL_WORLD_SIZE": "many"}, (0, 1)),
    ],
)
def test_ranks_are_those_of_torchrun_or_one(
    variables: dict[str, str], found: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert local_ranks() == found


def test_a_chunk_is_waited_for_until_the_writer_gives_up_or_stalls(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = filled(path, whole=False)
    found = reader(path)
    assert (found.chunks_present, found.has(0), found.has(1)) == (3, True, False)
    monkeypatch.setattr(segment_reader, "STALL_S", 0.0)
    assert not found.wait_for_chunk(1)
    assert found.wait_for_chunk(2)
    offset, length = spans(DATA)[1]
    writer.put(1, offset, memoryview(DATA)[offset : offset + length])
    assert found.wait_for_chunk(1)
    found.close()
    writer.give_up()


def test_a_writer_that_fails_ends_the_wait_at_once(path: Path) -> None:
    writer = filled(path, whole=False)
    found = reader(path)
    threading.Timer(0.05, writer.give_up).start()
    assert not found.wait_for_chunk(1)
    found.close()


def test_a_segment_that_contradicts_its_manifest_is_refused(path: Path) -> None:
    writer = filled(path)
    head = segment.read_head(writer._fd)
    for change, problem in (
        ({"chunks": 3}, "has 3 chunks"),
        ({"size_bytes": len(DATA) - 1}, f"{len(DATA) - 1} bytes; its manifest says otherwise"),
    ):
        os.pwrite(writer._fd, replace(head, **change).to_bytes(), 0)
        with pytest.raises(Corrupt, match=problem):
            find_segment("run-a")
    os.pwrite(writer._fd, head.to_bytes(), 0)
    os.truncate(path, head.data_offset + len(DATA) - 1)
    with pytest.raises(Corrupt, match=f"is truncated: it has {head.data_offset + len(DATA) - 1} of"):
        find_segment("run-a")
    writer.give_up()


def test_a_segment_of_another_run_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = filled(path)
    monkeypatch.setenv(segment.PATH_VARIABLE, str(path))
    with pytest.raises(Corrupt, match="holds a checkpoint of run run-a, not of run-b"):
        find_segment("run-b")
    monkeypatch.setenv(segment.PATH_VARIABLE, "")
    assert find_segment("run-a") is None
    writer.give_up()


def test_a_fetcher_that_never_chooses_is_not_waited_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_segment("run-a") is None
    writer = SegmentWriter(path)
    monkeypatch.setattr(segment_reader, "CHOOSE_S", 0.05)
    assert find_segment("run-a") is None
    assert path.exists()
    writer.give_up()


def test_what_a_killed_fetcher_left_before_it_chose_is_removed_by_the_reader(path: Path) -> None:
    writer = SegmentWriter(path)
    os.close(writer._fd)  # as its death would
    assert find_segment("run-a") is None
    assert not path.exists()


# --- whose files -----------------------------------------------------------------------------------------------------


def test_a_folder_or_a_file_of_others_is_refused(path: Path) -> None:
    path.parent.mkdir(mode=0o755)
    path.parent.chmod(0o755)
    with pytest.raises(AccessDenied, match=r"is not this user's alone \(owner \d+, drwxr-xr-x\): remove it"):
        SegmentWriter(path)
    path.parent.chmod(0o700)
    path.write_bytes(b"")
    path.chmod(0o640)
    with pytest.raises(AccessDenied, match="is not this user's alone"):
        segment_files.open_private(path)
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(AccessDenied, match="is not this user's alone"):
        segment_files.open_private(path)
    path.unlink()
    path.symlink_to("elsewhere")
    with pytest.raises(AccessDenied, match="cannot be opened"):
        segment_files.open_private(path)
    path.unlink()
    path.parent.rmdir()
    path.parent.symlink_to("/tmp")
    with pytest.raises(AccessDenied, match="is not this user's alone"):
        SegmentWriter(path)


def test_a_file_that_is_no_segment_is_neither_used_nor_removed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for content in (b"", b"not a segment"):
        file = other / "file"
        file.write_bytes(content)
        file.chmod(0o600)
        with pytest.raises(StoreUnavailable, match="exists and is not a segment: remove it, or use --into"):
            SegmentWriter(file)
        segment_files.remove(file)
        assert file.read_bytes() == content
    with pytest.raises(StoreUnavailable, match="does not exist: make it first"):
        SegmentWriter(tmp_path / "none" / "file")
    with pytest.raises(FileNotFoundError), segment_files.open_folder(other / "file"):
        pass


def test_a_segment_of_a_living_fetcher_is_not_taken_and_that_of_a_dead_one_is(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_writer, "BUSY_S", 0.02)
    writer = filled(path)
    with pytest.raises(StoreUnavailable, match="is being filled or kept by another fetcher"):
        SegmentWriter(path)
    os.close(writer._fd)
    second = filled(path)
    assert reader(path).chunks_present == 4
    second.give_up()
    assert not path.exists()


def test_orphans_of_other_runs_are_removed_once_they_are_old(path: Path) -> None:
    names = ("old", "young", "alive", "foreign", "run-a")
    writers = {name: SegmentWriter(segment_files.default_path(name)) for name in names}
    for name in ("old", "young", "foreign", "run-a"):
        os.close(writers[name]._fd)
    (path.parent / "foreign").write_bytes(b"something else")
    for name in ("old", "alive", "foreign", "run-a"):
        os.utime(path.parent / name, (1.0, 1.0))
    segment_files.remove_orphans(but="run-a")
    assert sorted(os.listdir(path.parent)) == ["alive", "foreign", "run-a", "young"]
    writers["alive"].give_up()
    segment_files.remove(path)
    assert sorted(os.listdir(path.parent)) == ["foreign", "young"]


def test_the_file_of_another_fetcher_is_not_removed_for_ours(path: Path) -> None:
    writer = filled(path)
    fd = segment_files.open_private(path)
    os.rename(path, path.with_name("moved"))
    other = filled(path)
    assert not segment_files.unlink_if_same(path, fd)
    assert path.exists()
    other.give_up()
    assert not segment_files.unlink_if_same(path, fd)
    os.close(fd)
    with suppress(FileNotFoundError):
        os.unlink(path.with_name("moved"))
    writer.give_up()


# --- no room ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spare_bytes", "fits"), [(0, True), (1, False)])
def test_a_checkpoint_needs_its_size_twice_and_a_little_more(
    path: Path, monkeypatch: pytest.MonkeyPatch, spare_bytes: int, fits: bool
) -> None:
    free = len(DATA) + int(len(DATA) * segment_writer.SPARE) + 1 - spare_bytes  # a trainer copies it
    monkeypatch.setattr(segment_writer, "_available_memory_bytes", lambda: free)
    writer = SegmentWriter(path)
    if fits:
        writer.choose(MANIFEST, "s", ())
        assert segment.read_state(writer._fd) == State.FILLING
    else:
        with pytest.raises(SegmentFull, match=r"has no room for the checkpoint: 197 kB needed, 201 kB free"):
            writer.choose(MANIFEST, "s", ())
    writer.give_up()


@pytest.mark.parametrize(
    ("number", "kind", "problem"),
    [
        (errno.ENOSPC, SegmentFull, "became full"),
        (errno.EDQUOT, SegmentFull, "became full"),
        (errno.EFBIG, SegmentFull, "became full"),
        (errno.ENOMEM, SegmentFull, "became full"),
        (errno.EIO, StoreUnavailable, "cannot be written: Input/output error"),
    ],
)
def test_a_write_that_fails_is_one_sentence(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[StoreError], problem: str
) -> None:
    writer = SegmentWriter(path)
    writer.choose(MANIFEST, "s", ())

    def fails(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(segment_writer.os, "pwrite", fails)
        with pytest.raises(StoreError, match=problem) as caught:
            writer.put(0, 0, memoryview(DATA)[:CHUNK])
    assert type(caught.value) is kind
    writer.give_up()


def test_a_write_that_is_cut_short_continues(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    with monkeypatch.context() as patched:
        patched.setattr(segment_writer.os, "pwrite", lambda fd, data, at: real(fd, data[:9999], at))
        writer = filled(path)
    found = reader(path)
    into = bytearray(len(DATA))
    found.read(0, memoryview(into))
    assert into == DATA
    found.close()
    writer.give_up()


def test_a_name_that_is_lost_whenever_it_is_made_ends_with_a_sentence(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_files, "lock_if_free", lambda *_: False)
    monkeypatch.setattr(segment_writer, "TRIES", 1)
    with pytest.raises(StoreUnavailable, match="was removed 1 times: stop other fetchers of this run"):
        SegmentWriter(path)


# --- the store over it, and pulling into it --------------------------------------------------------------------------


def test_a_machine_without_a_segment_refers_to_the_stores_behind(tmp_path: Path) -> None:
    near = FileStore(tmp_path / "near")
    for step in (3, 4):
        save(near, DATA, step=step)
    store = FetchedStore(None, [near], "run-a")
    assert (store.url, str(store), store.used) == ("fetched:", "nothing was fetched to this machine", False)
    assert (store.runs(), store.steps("run-a"), store.steps("run-b")) == (["run-a"], [4], [])
    manifest = store.manifest("run-a", 3)
    assert manifest.step == 3
    with pytest.raises(NotFound):
        store.manifest("run-a", 9)
    with pytest.raises(NotFound, match="fetched: has no step 3 of run run-a"):
        FetchedStore(None, [], "run-a").manifest("run-a", 3)
    into = memoryview(bytearray(CHUNK))
    store.read_chunk(manifest, 0, into)
    assert into == DATA[:CHUNK]
    assert store.map(manifest) is None
    for call in (lambda: store.writer("run-a", 1, size_bytes=1, chunk_bytes=1), lambda: store.delete("run-a", 1)):
        with pytest.raises(StoreError, match="is for reading"):
            call()
    store.release()
    store.close()


def test_chunks_come_from_the_segment_and_what_it_lacks_from_behind(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = FileStore(tmp_path / "near")
    save(near, DATA, step=4)
    writer = filled(path, whole=False, store=near.url)
    monkeypatch.setattr(segment_reader, "STALL_S", 0.0)
    store = fetched_before([near], "run-a")
    assert store is not None
    assert store.steps("run-a") == [4]
    manifest = store.manifest("run-a", 4)
    out = memoryview(bytearray(len(DATA)))
    for chunk, (offset, length) in enumerate(spans(DATA)):
        store.read_chunk(manifest, chunk, out[offset : offset + length])
    assert out == DATA
    assert store.used
    assert str(store) == (
        f"3 chunks had been fetched from {near.url}; the fetcher did not bring 1, which came from the stores "
        "themselves; it passed over step 5: gone"
    )
    started_s, ended_s = store.fetch_interval_s()
    assert 0 < started_s < ended_s
    store.release()
    assert not path.exists()
    store.close()
    writer.give_up()


@pytest.mark.parametrize(("origin", "used"), [("behind", [4]), ("elsewhere", [])])
def test_where_no_store_answers_a_segment_counts_if_it_came_from_one_of_them(
    path: Path, caplog: pytest.LogCaptureFixture, origin: str, used: list[int]
) -> None:
    class Silent(FileStore):
        def manifest(self, run: str, step: int) -> Any:
            raise StoreUnavailable("no answer")

    silent = Silent(path.parent / "silent")
    writer = filled(path, store=silent.url if origin == "behind" else "file:///elsewhere")
    store = fetched_before([silent], "run-a")
    assert store is not None
    assert store.steps("run-a") == used
    assert ("is not used: it comes from file:///elsewhere" in caplog.text) == (origin == "elsewhere")
    store.release()
    assert path.exists() == (origin == "elsewhere")
    store.close()
    writer.give_up()


def test_a_segment_of_a_checkpoint_that_was_replaced_is_not_used(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    near = FileStore(tmp_path / "near")
    save(near, payload(len(DATA), seed=1), step=4)
    writer = filled(path, store=near.url)
    store = fetched_before([near], "run-a")
    assert store is not None
    assert store.steps("run-a") == []
    assert "no store has such a checkpoint any more" in caplog.text
    assert store.manifest("run-a", 4).digests != MANIFEST.digests
    store.close()
    writer.give_up()


def test_a_pull_takes_the_newest_that_can_be_read_and_tells_what_it_passed_over(path: Path, tmp_path: Path) -> None:
    near, far = FileStore(tmp_path / "near"), FileStore(tmp_path / "far")
    save(near, DATA, step=5)
    save(far, DATA, step=4)
    FilePlace(near.root).flip("run-a", 5, CHUNK)
    found = pull([near, far], "run-a", None, path, stop=threading.Event())
    assert found is not None
    writer, pulled = found
    assert (pulled.step, pulled.store, pulled.size_bytes) == (4, far.url, len(DATA))
    assert pulled.seconds > 0
    (problem,) = pulled.passed_over
    assert problem.startswith("step 5: chunk 1")
    reader(path).close()
    writer.give_up()


def test_a_pull_without_a_checkpoint_leaves_nothing(path: Path, tmp_path: Path) -> None:
    near = FileStore(tmp_path / "near")
    assert pull([near], "run-a", None, path, stop=threading.Event()) is None
    assert not path.exists()
    save(near, DATA, step=5)
    (near.root / "run-a" / "step-000000000005.json").write_text("{")
    with pytest.raises(StoreUnavailable, match="no checkpoint of run run-a can be fetched: step 5 in"):
        pull([near], "run-a", None, path, stop=threading.Event())
    assert not path.exists()


def test_a_pull_that_is_stopped_leaves_nothing(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    class Slow(FileStore):
        """Its chunks come once the pull has ended."""

        def read_chunk(self, manifest: Manifest, chunk: int, into: memoryview) -> None:
            assert released.wait(60)

    near = Slow(tmp_path / "near")
    save(near, DATA, step=5)
    monkeypatch.setattr(pull_module, "END_S", 0.01)
    stop = threading.Event()
    stop.set()
    try:
        with pytest.raises(Unwanted):
            pull([near], "run-a", None, path, stop=stop)
    finally:
        released.set()
    assert not path.exists()


def test_folders_and_files_that_cannot_be_are_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"/file/in cannot be made \(Not a directory\): pass another path with --into"):
        segment_files.make_folder(tmp_path / "file" / "in")
    (tmp_path / "loop").symlink_to("loop")
    with (
        pytest.raises(AccessDenied, match=r"/loop cannot be opened: Too many levels of symbolic links"),
        segment_files.open_folder(tmp_path / "loop"),
    ):
        pass
    for missing in ("nothing", "file"):
        with pytest.raises(FileNotFoundError), segment_files.open_folder(tmp_path / missing):
            pass


def test_a_segment_that_cannot_be_made_is_reported(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Path) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(segment_files, "create", full)
    with pytest.raises(StoreUnavailable, match="/run-a cannot be made: No space left on device"):
        SegmentWriter(path)


def test_a_segment_that_was_cut_off_is_corrupt(path: Path) -> None:
    filled(path)
    found = reader(path)
    into = memoryview(bytearray(len(DATA)))
    found.read(0, into)
    assert bytes(into) == DATA
    os.truncate(path, PAGE_BYTES)
    with pytest.raises(Corrupt, match="is truncated at"):
        found.read(0, into)
    found.close()


def test_a_process_that_is_not_there_was_started_at_0_and_this_one_later(monkeypatch: pytest.MonkeyPatch) -> None:
    assert clock.started_ticks(2**31 - 1) == 0
    own = clock.started_ticks()
    assert own == clock.started_ticks(os.getpid()) > clock.started_ticks(1) >= 0
    assert clock.process_started_s() == own / os.sysconf("SC_CLK_TCK") <= clock.now_s()
    monkeypatch.setattr(clock, "started_ticks", lambda: 0)
    assert own / os.sysconf("SC_CLK_TCK") <= clock.process_started_s() <= clock.now_s()


def test_the_package_is_the_command() -> None:
    words = [sys.executable, "-m", "deepvm.fetch", "--help"]
    found = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.startswith("usage: deepvm-fetch")
