"""A store's folder may hold anything under any name: what is no plain file is told at once, and never waited for."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from deepvm.errors import Corrupt, StoreError
from deepvm.store.base import MOST_MANIFEST_BYTES
from deepvm.store.files.store import FileStore
from tests.support.store.checkpoints import CHUNK, payload, read, save

pytestmark = pytest.mark.timeout(20)  # an open of a FIFO waits for ever

DATA = payload(2 * CHUNK + 5, 1)
MANIFEST_2, DATA_2 = "step-000000000002.json", "step-000000000002.safetensors"


def bind(path: Path) -> None:
    at = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"/proc/self/fd/{at}/{path.name}")  # a socket's path has at most 107 characters
    finally:
        os.close(at)


STRANGE: dict[str, Callable[[Path], None]] = {
    "a FIFO": os.mkfifo,
    "a folder": Path.mkdir,
    "a socket": bind,
    "a link to a terminal": lambda path: path.symlink_to("/dev/tty"),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
}


@pytest.fixture
def kept(tmp_path: Path) -> FileStore:
    """Steps 1 to 3."""
    store = FileStore(tmp_path)
    for step in (1, 2, 3):
        save(store, DATA, step=step)
    return FileStore(tmp_path)


def swap(store: FileStore, name: str, make: Callable[[Path], None]) -> Path:
    path = store.root / "run-a" / name
    path.unlink()
    make(path)
    return path


@pytest.mark.parametrize("kind", STRANGE)
def test_a_manifest_that_is_no_plain_file_is_one_sentence_and_the_others_are_read(kept: FileStore, kind: str) -> None:
    swap(kept, MANIFEST_2, STRANGE[kind])
    with pytest.raises(StoreError, match="step"):
        kept.manifest("run-a", 2)
    for step in (1, 3):
        assert read(kept, step=step) == DATA


@pytest.mark.parametrize("kind", STRANGE)
def test_bytes_that_are_no_plain_file_are_one_sentence_for_every_way_to_read_them(kept: FileStore, kind: str) -> None:
    manifest = kept.manifest("run-a", 2)
    swap(kept, DATA_2, STRANGE[kind])
    with pytest.raises(StoreError):
        kept.read_chunk(manifest, 0, memoryview(bytearray(CHUNK)))
    try:
        mapped = kept.map(manifest)
    except StoreError:
        return
    assert mapped is None  # a link to nothing: nobody knows whether its file system is local, so it is not mapped


@pytest.mark.parametrize("name", [MANIFEST_2, DATA_2])
def test_commands_do_not_wait_for_a_fifo(kept: FileStore, name: str) -> None:
    swap(kept, name, os.mkfifo)
    for command, code in (("ls", 0), ("verify", 1)):
        words = [sys.executable, "-m", "deepvm", "checkpoint", command, kept.url]
        done = subprocess.run(words, capture_output=True, text=True, timeout=15)
        assert "Traceback" not in done.stderr
        assert done.returncode == code or command == "ls", done.stderr


def test_a_manifest_without_an_end_is_not_read(kept: FileStore) -> None:
    swap(kept, MANIFEST_2, lambda path: path.symlink_to("/dev/zero"))
    code = textwrap.dedent(f"""
        import resource
        from deepvm.errors import Corrupt
        from deepvm.store.files.store import FileStore
        resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
        try:
            FileStore({str(kept.root)!r}).manifest("run-a", 2)
        except Corrupt as error:
            print(error)
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=15)
    assert "not a regular file" in done.stdout, done.stderr[-500:]


def test_a_manifest_that_is_too_long_is_not_read_to_its_end(kept: FileStore) -> None:
    path = kept.root / "run-a" / MANIFEST_2
    os.truncate(path, 2**40)  # a hole takes no disk
    with pytest.raises(Corrupt, match=f"at most {MOST_MANIFEST_BYTES} are allowed"):
        kept.manifest("run-a", 2)


def test_a_manifest_may_be_a_link_to_a_plain_file(kept: FileStore) -> None:
    path = kept.root / "run-a" / MANIFEST_2
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")
    assert read(kept, step=2) == DATA


def test_a_fifo_can_be_deleted_and_is_in_nobodys_way(kept: FileStore) -> None:
    litter = kept.root / "run-a" / ".step-000000000009.json.tmp-abc"
    os.mkfifo(litter)
    save(kept, DATA, step=4)
    swap(kept, MANIFEST_2, os.mkfifo)
    swap(kept, DATA_2, os.mkfifo)
    kept.delete("run-a", 2)
    assert kept.steps("run-a") == [1, 3, 4]
    kept.close()
    assert litter.exists()  # no writer of ours made it


def modes(root: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in (root / "run-a").iterdir()}


def test_a_private_store_writes_for_its_owner_only_also_over_what_was_readable(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        save(FileStore(tmp_path), DATA, step=1)
        store = FileStore(tmp_path, private=True)
        assert set(modes(tmp_path).values()) == {0o644}  # as any other file
        save(store, DATA, step=2)
        store.delete("run-a", 1)
        save(store, DATA, step=3)  # over the bytes of step 1
        assert set(modes(tmp_path).values()) == {0o600}, modes(tmp_path)
        store.close()
    finally:
        os.umask(old)
