"""What files do beyond the contract: crashes, full and forbidden disks, files written over, and plain readers."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from deepvm.errors import AccessDenied, Corrupt, NotFound, StoreUnavailable
from deepvm.store.files import mapping
from deepvm.store.files import store as store_module
from deepvm.store.files.staged_file import StagedFile
from deepvm.store.files.store import FileStore
from tests.support import ROOT
from tests.support.store.checkpoints import CHUNK, manifest_of, payload, put, read, safetensors_payload, save


def files(root: Path) -> list[str]:
    return sorted(p.name for p in root.rglob("*") if p.is_file())


KILLED_IN_PUBLISH = """
import os, signal, sys
from deepvm.store.files.store import FileStore
from tests.support.store.checkpoints import CHUNK, payload, save

calls = 0
def counted(function):
    def call(*words):
        global calls
        if sys._getframe(1).f_code.co_name in ("publish", "rename", "_unlink"):
            calls += 1
            if calls > int(sys.argv[2]):
                os.kill(os.getpid(), signal.SIGKILL)
        return function(*words)
    return call

os.rename, os.unlink = counted(os.rename), counted(os.unlink)
save(FileStore(sys.argv[1]), payload(3 * CHUNK, seed=2))
"""


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_a_step_saved_again_is_there_after_a_kill_at_any_point(tmp_path: Path, calls: int) -> None:
    old, new = payload(3 * CHUNK, seed=1), payload(3 * CHUNK, seed=2)
    with contextlib.closing(FileStore(tmp_path)) as store:
        save(store, old)
    words = [sys.executable, "-c", KILLED_IN_PUBLISH, str(tmp_path), str(calls)]
    killed = subprocess.run(words, cwd=ROOT, timeout=60, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    with contextlib.closing(FileStore(tmp_path)) as store:
        assert store.steps("run-a") == [1]
        assert read(store) == (new if calls else old)
        store.delete("run-a", 1)
        assert store.steps("run-a") == []


def test_what_is_on_the_disk_at_each_moment_of_a_publication(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    real = store_module.sync_directory

    def sync(directory: Path) -> None:
        real(directory)
        seen.append(sorted(path.suffix for path in directory.iterdir() if path.name.startswith("step-")))

    monkeypatch.setattr(store_module, "sync_directory", sync)
    with contextlib.closing(FileStore(tmp_path)) as store:
        for seed in (1, 2):
            seen.clear()
            save(store, payload(CHUNK, seed))
            both = [".json", ".safetensors"]
            assert seen[-3:] == ([[], [], both] if seed == 1 else [both, [".safetensors"], both])


def test_a_file_is_local_by_the_type_of_its_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = Path("/proc/self/status")
    assert mapping.is_local(kernels)
    monkeypatch.setattr(mapping, "_FAR", {0x9FA0})  # of the kernel's own files
    assert not mapping.is_local(kernels)
    assert mapping.is_local(Path("/sys"))
    assert not mapping.is_local(tmp_path / "nothing")


def test_a_file_that_is_cut_off_is_not_mapped(tmp_path: Path) -> None:
    data = payload(2 * CHUNK)
    with contextlib.closing(FileStore(tmp_path)) as store:
        save(store, data)
        manifest = store.manifest("run-a", 1)
        path = tmp_path / "run-a" / "step-000000000001.safetensors"
        with contextlib.closing(mapping.map_file(path, manifest)) as mapped:
            assert mapped[:] == data
            mapped[:4] = b"mine"
        assert path.read_bytes() == data
        os.truncate(path, 2 * CHUNK - 1)
        with pytest.raises(Corrupt, match=f"{2 * CHUNK - 1}"):
            mapping.map_file(path, manifest)


def test_safetensors_opens_what_is_kept(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load, load_file

    data = safetensors_payload()
    with contextlib.closing(FileStore(tmp_path)) as store:
        save(store, data, step=12)
    found = load_file(tmp_path / "run-a" / "step-000000000012.safetensors")
    for name, tensor in load(data).items():
        assert torch.equal(found[name], tensor)


WRITER = """
    from tests.support.store.checkpoints import *
    from deepvm.store.files.store import FileStore
    store = FileStore({root!r})
    data = payload(8 * CHUNK, 1)
    step = 0
    print("ready", flush=True)
    while True:
        step += 1
        save(store, data, step=step)
        if step > 2:
            store.delete("run-a", step - 2)
"""


@pytest.mark.parametrize("after_s", [0.0, 0.003, 0.01, 0.02, 0.031, 0.05])
def test_a_killed_writer_leaves_whole_checkpoints_and_its_litter_goes(tmp_path: Path, after_s: float) -> None:
    code = textwrap.dedent(WRITER).format(root=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout as out:
        assert out.readline() == b"ready\n"
        time.sleep(after_s)
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    store = FileStore(tmp_path)
    for step in store.steps("run-a"):
        assert read(store, step=step) == payload(8 * CHUNK, 1)
    kept = len(store.steps("run-a"))
    save(store, payload(10), step=10**6)
    left = files(tmp_path)
    assert not [name for name in left if ".tmp-" in name]
    assert len([name for name in left if name.endswith(".json")]) == kept + 1


def test_a_living_writers_file_is_left_alone(tmp_path: Path) -> None:
    one, other = FileStore(tmp_path), FileStore(tmp_path)
    data = payload(3 * CHUNK)
    manifest = manifest_of(data, "run-a", 1)
    writer = one.writer("run-a", 1, size_bytes=len(data), chunk_bytes=CHUNK)
    put(writer, data, manifest, [0, 1])
    save(other, payload(10), step=2)  # cleans up before it writes
    put(writer, data, manifest, [2])
    writer.publish(manifest)
    assert read(other, step=1) == data


def test_a_deleted_file_is_written_over_if_nobody_reads_it(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    path = tmp_path / "run-a" / "step-000000000001.safetensors"
    save(store, payload(3 * CHUNK, 1), step=1)
    number = path.stat().st_ino
    store.delete("run-a", 1)
    assert store.steps("run-a") == []
    save(store, payload(2 * CHUNK + 3, 2), step=2)
    assert path.with_name("step-000000000002.safetensors").stat().st_ino == number
    assert read(store, step=2) == payload(2 * CHUNK + 3, 2)
    store.delete("run-a", 2)
    store.close()
    assert files(tmp_path) == []


@pytest.mark.parametrize("how", ["open", "mapped", "linked"])
def test_a_deleted_file_that_somebody_reads_is_never_written_over(tmp_path: Path, how: str) -> None:
    store, data = FileStore(tmp_path), payload(3 * CHUNK, 1)
    path = tmp_path / "run-a" / "step-000000000001.safetensors"
    save(store, data, step=1)
    link = tmp_path / "somewhere-else"
    with contextlib.ExitStack() as stack:
        if how == "linked":
            os.link(path, link)
        else:
            file = stack.enter_context(path.open("rb"))
            view = stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            if how == "mapped":
                file.close()
        store.delete("run-a", 1)
        save(store, payload(3 * CHUNK, 2), step=2)
        assert (link.read_bytes() if how == "linked" else bytes(view)) == data
    store.close()


def _blocks_written(store: FileStore, data: bytes, step: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """The chunks that reach the disk when this is saved."""
    written = []
    with monkeypatch.context() as patch:
        real = StagedFile.write
        patch.setattr(StagedFile, "write", lambda aside, pieces, at: (written.append(at), real(aside, pieces, at))[1])
        save(store, data, step=step)
    return len(written) - 1  # the manifest


def _changed(data: bytes, at: int, length: int | None = None) -> bytes:
    changed = bytearray(data[:length]) + bytes(max(0, (length or 0) - len(data)))
    changed[at] ^= 1
    return bytes(changed)


@pytest.mark.parametrize("length", [8 * CHUNK + 7, 6 * CHUNK + 3, 9 * CHUNK], ids=["same", "shorter", "longer"])
def test_what_is_the_same_in_a_file_written_over_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    first = payload(8 * CHUNK + 7, 1)
    then = _changed(first, 2 * CHUNK + 5, length)
    with contextlib.closing(FileStore(tmp_path)) as store:
        save(store, first, step=1)
        assert _blocks_written(store, first, 2, monkeypatch) == 9  # there is no file to write over yet
        store.delete("run-a", 1)
        at_the_end = {8 * CHUNK + 7: 0, 6 * CHUNK + 3: 1, 9 * CHUNK: 1}[length]
        assert _blocks_written(store, then, 3, monkeypatch) == 1 + at_the_end
        assert read(store, step=3) == then
        assert read(store, step=2) == first
        store.delete("run-a", 2)
        assert _blocks_written(store, payload(8 * CHUNK + 7, 5), 4, monkeypatch) == 9
        assert read(store, step=4) == payload(8 * CHUNK + 7, 5)


@pytest.mark.parametrize(("how", "written"), [("flipped", 1), ("cut off", 4), ("manifest damaged", 4)])
def test_what_was_tampered_with_in_a_file_to_write_over_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, written: int
) -> None:
    data = payload(4 * CHUNK, 1)
    with contextlib.closing(FileStore(tmp_path)) as store:
        for step in (1, 2):
            save(store, data, step=step)
        path = tmp_path / "run-a" / "step-000000000001.safetensors"
        times = path.stat()
        if how == "manifest damaged":
            path.with_suffix(".json").write_bytes(b"{")
        else:
            with path.open("r+b") as file:
                if how == "flipped":
                    file.seek(CHUNK)
                    file.write(bytes([data[CHUNK] ^ 1]))
                else:
                    file.truncate(3 * CHUNK)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # a flipped bit changes no time
        store.delete("run-a", 1)
        assert _blocks_written(store, data, 3, monkeypatch) == written
        assert read(store, step=3) == data


def test_a_store_that_only_deletes_keeps_nothing(tmp_path: Path) -> None:
    save(FileStore(tmp_path), payload(100), step=1)
    FileStore(tmp_path).delete("run-a", 1)
    assert files(tmp_path) == []


def test_a_cut_off_file_is_corrupt_and_a_missing_one_is_not_listed(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    manifest = save(store, payload(2 * CHUNK))
    path = tmp_path / "run-a" / "step-000000000001.safetensors"
    os.truncate(path, CHUNK + 5)
    with pytest.raises(Corrupt, match="ends at 65541 of 131072 bytes"):
        store.read_chunk(manifest, 1, memoryview(bytearray(CHUNK)))
    path.unlink()
    assert store.steps("run-a") == []
    with pytest.raises(NotFound):
        store.read_chunk(manifest, 1, memoryview(bytearray(CHUNK)))


@pytest.mark.parametrize("text", [b"", b"{}", b"[1]", b'{"format": "other/9"}', b"\xff\xfe", b"null"])
def test_a_damaged_manifest_is_corrupt(tmp_path: Path, text: bytes) -> None:
    store = FileStore(tmp_path)
    save(store, payload(10))
    (tmp_path / "run-a" / "step-000000000001.json").write_bytes(text)
    with pytest.raises(Corrupt):
        store.manifest("run-a", 1)


def test_a_manifest_under_another_steps_name_is_corrupt(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    save(store, payload(10), step=1)
    for suffix in ("json", "safetensors"):
        (tmp_path / "run-a" / f"step-{1:012d}.{suffix}").rename(tmp_path / "run-a" / f"step-{2:012d}.{suffix}")
    with pytest.raises(Corrupt, match="step 1"):
        store.manifest("run-a", 2)


def test_two_sessions_that_save_one_step_never_mix(tmp_path: Path) -> None:
    data = [payload(4 * CHUNK, seed) for seed in range(4)]
    stores = [FileStore(tmp_path) for _ in data]
    reader, bad, stop = FileStore(tmp_path), [], threading.Event()

    def again(index: int) -> None:
        for _ in range(10):
            with contextlib.suppress(NotFound):  # another session is just replacing what this one has saved
                save(stores[index], data[index])

    def look() -> None:
        while not stop.is_set():
            try:
                found = reader.manifest("run-a", 1)
            except NotFound:
                continue
            with contextlib.suppress(Corrupt, NotFound):  # saved again while we read: told, not mixed
                if read(reader) not in data:
                    bad.append(found)

    threads = [threading.Thread(target=again, args=(i,)) for i in range(len(data))]
    watcher = threading.Thread(target=look)
    watcher.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    stop.set()
    watcher.join(10)
    assert not bad
    assert read(reader) in data
    assert [name for name in files(tmp_path) if ".tmp-" in name] == []


def test_a_file_that_a_cleaner_caught_before_its_lock_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, cleaners = fcntl.flock, []

    def flock(fd: int, how: int) -> None:
        if not cleaners:
            (caught,) = tmp_path.iterdir()
            cleaners.append((caught, os.open(caught, os.O_RDWR)))
            real(cleaners[0][1], how)
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    found = StagedFile(tmp_path, "step-1.json")
    ((caught, cleaner),) = cleaners
    caught.unlink()
    os.close(cleaner)
    assert found.path.exists()
    found.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_crash_between_the_two_renames_leaves_no_manifest_of_other_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(FileStore(tmp_path), payload(100, 1))
    data, rename = payload(100, 2), os.rename
    manifest = manifest_of(data, "run-a", 1)
    writer = FileStore(tmp_path).writer("run-a", 1, size_bytes=100, chunk_bytes=CHUNK)
    put(writer, data, manifest, [0])

    def crash_at_the_manifest(source: Path, target: Path) -> None:
        if target.suffix == ".json":
            raise KeyboardInterrupt
        rename(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", crash_at_the_manifest)
        with pytest.raises(KeyboardInterrupt):
            writer.publish(manifest)
    assert FileStore(tmp_path).steps("run-a") == []
    writer.abort()
    assert files(tmp_path) == []


def test_two_publications_of_a_step_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename, theirs = os.rename, payload(100, 2)
    other = threading.Thread(target=save, args=(FileStore(tmp_path), theirs))

    def let_the_other_come_between(source: Path, target: Path) -> None:
        rename(source, target)
        if other.ident is None:
            other.start()
            other.join(0.3)
            assert other.is_alive()

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", let_the_other_come_between)
        save(FileStore(tmp_path), payload(100, 1))
        other.join(20)
    assert read(FileStore(tmp_path)) == theirs


def test_a_lock_that_is_never_given_back_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepvm.store.files.store.LOCK_S", 0.1)
    store = FileStore(tmp_path)
    save(store, payload(10), step=1)
    fd = os.open(tmp_path / "run-a", os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with pytest.raises(StoreUnavailable, match="locked"):
            save(store, payload(10), step=2)
    finally:
        os.close(fd)
    assert store.steps("run-a") == [1]
    assert len(files(tmp_path)) == 2


# --- disks that refuse --------------------------------------------------------------------------------------------


def test_too_large_a_file_is_reported_before_the_first_byte(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        with pytest.raises(StoreUnavailable, match=r"no room .*2\.1 MB needed, .* free"):
            store.writer("run-a", 1, size_bytes=2**21, chunk_bytes=CHUNK)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files(tmp_path) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Path:
    where = tmp_path / "disk"
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", where], capture_output=True, timeout=10, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.decode().strip()}")
    return where


def test_a_full_disk_is_reported_and_older_checkpoints_stay(small_disk: Path) -> None:
    try:
        store, data = FileStore(small_disk / "kept"), payload(3 * 2**20)
        save(store, data, step=1)
        with pytest.raises(StoreUnavailable, match=r"3\.15 MB needed, 1\.04 MB free: delete old checkpoints"):
            save(store, data, step=2)
        assert read(store, step=1) == data
        assert len(files(small_disk)) == 2
        store.delete("run-a", 1)
        save(store, data, step=2)  # into the room of the old one
        assert read(store, step=2) == data
        store.close()
    finally:
        subprocess.run(["umount", small_disk], timeout=10, check=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_forbidden_directories_are_reported(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    save(store, payload(10))
    (tmp_path / "run-a").chmod(0)
    try:
        with pytest.raises(AccessDenied, match="permissions"):
            store.steps("run-a")
        with pytest.raises(AccessDenied, match="permissions"):
            save(store, payload(10), step=2)
    finally:
        (tmp_path / "run-a").chmod(0o755)


def test_a_file_in_the_way_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(StoreUnavailable, match="Not a directory"):
        save(FileStore(tmp_path / "file"), payload(10))


def test_a_read_only_disk_is_reported(tmp_path: Path) -> None:
    if not os.access("/proc/self", os.R_OK) or os.access("/proc/sys/nothing", os.F_OK):
        pytest.skip("no file system here that refuses writing")
    with pytest.raises((AccessDenied, StoreUnavailable)):
        save(FileStore("/proc/deepvm"), payload(10))
