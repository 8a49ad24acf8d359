"""Staged files: what is written over, what is given back to the disk, and writes that the kernel takes in parts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from deepvm.errors import AccessDenied, Corrupt, NotFound, StoreError, StoreUnavailable
from deepvm.store import regular_file
from deepvm.store.files import staged_file
from deepvm.store.files.store import FileStore
from deepvm.store.regular_file import read_regular, write_private
from tests.support.store.checkpoints import CHUNK, manifest_of, payload, put, read, save


def test_writes_that_are_cut_short_continue_where_they_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a signal, or a disk that is nearly full, cuts them."""
    real: dict[str, Any] = {"pwritev": os.pwritev, "pwrite": os.pwrite}
    monkeypatch.setattr(staged_file.os, "pwritev", lambda fd, pieces, at: real["pwritev"](fd, [pieces[0][:1000]], at))
    monkeypatch.setattr(staged_file.os, "pwrite", lambda fd, data, at: real["pwrite"](fd, data[:3333], at))
    data = payload(2 * CHUNK + 77)
    store = FileStore(tmp_path)
    save(store, data, pieces=3)
    assert read(store) == data


@pytest.mark.parametrize("sizes", [(3 * CHUNK, CHUNK + 5), (CHUNK + 5, 3 * CHUNK), (CHUNK, CHUNK)])
def test_a_file_that_is_written_over_has_the_length_of_the_new_checkpoint(
    tmp_path: Path, sizes: tuple[int, int]
) -> None:
    store = FileStore(tmp_path)
    for step, size in enumerate(sizes):
        save(store, payload(size, step), step=step)
        if not step:
            save(store, payload(5, 9), step=9)
            store.delete("run-a", 0)
    (file,) = (path for path in (tmp_path / "run-a").iterdir() if path.name == "step-000000000001.safetensors")
    assert file.read_bytes() == payload(sizes[1], 1)
    store.close()
    assert not [path for path in (tmp_path / "run-a").iterdir() if path.name.startswith(".")]


def test_a_writer_that_is_published_or_aborted_takes_nothing_more(tmp_path: Path) -> None:
    store, data = FileStore(tmp_path), payload(CHUNK)
    manifest = manifest_of(data, "run-a", 1)
    for end in ("publish", "abort"):
        writer = store.writer("run-a", 1, size_bytes=CHUNK, chunk_bytes=CHUNK)
        put(writer, data, manifest, [0])
        if end == "publish":
            writer.publish(manifest)
        else:
            writer.abort()
        with pytest.raises(StoreError, match="step 1 of run-a is published or aborted already"):
            put(writer, data, manifest, [0])
        writer.abort()
    assert read(store) == data


def test_a_folder_that_may_not_be_used_is_named(tmp_path: Path) -> None:
    from deepvm.store.files.store import explained

    for kind, number, text in (
        (AccessDenied, 13, "cannot be used .*: change its permissions"),
        (StoreUnavailable, 28, "has no room .*: 5 B needed, .* free: delete old checkpoints"),
        (StoreUnavailable, 5, "failed: Input/output error"),
        (StoreUnavailable, 2, "failed"),
    ):
        with pytest.raises(kind, match=text), explained(tmp_path, 5):
            raise OSError(number, os.strerror(number))
    with pytest.raises(NotFound, match="use another"), explained(tmp_path, missing="use another"):
        raise FileNotFoundError(2, "No such file")


def test_names_that_are_taken_again_and_again_end_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_file, "lock_if_free", lambda fd: False)
    with pytest.raises(StoreError, match=r"vanish as they are made|locked"):
        FileStore(tmp_path).writer("run-a", 1, size_bytes=5, chunk_bytes=5)


def test_a_regular_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abcde")
    assert read_regular(path, 5) == b"abcde"
    with pytest.raises(Corrupt, match="has 5 bytes, at most 4 are allowed"):
        read_regular(path, 4)
    path.write_bytes(b"")
    assert read_regular(path, 0) == b""


def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    fstat, asked = os.fstat, list[int]()

    def then_it_grows(fd: int) -> os.stat_result:
        found = fstat(fd)
        asked.append(fd)
        if len(asked) == 2:  # its type, then its length
            path.write_bytes(b"abcdef")
        return found

    monkeypatch.setattr(regular_file.os, "fstat", then_it_grows)
    with pytest.raises(Corrupt, match="has more than 4 bytes"):
        read_regular(path, 4)


def test_a_lease_is_waited_for_but_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    left, real = [3], os.open

    def leased(*words: Any) -> int:
        left[0] -= 1
        if left[0] > 0:
            raise BlockingIOError(11, "leased")
        return real(*words)

    monkeypatch.setattr(regular_file.os, "open", leased)
    assert read_regular(path, 5) == b"abc"
    left[0] = 10**9
    monkeypatch.setattr(regular_file, "LEASE_S", 0.0)
    with pytest.raises(BlockingIOError):
        read_regular(path, 5)


def test_a_private_file_replaces_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("old and longer")
    path.chmod(0o644)
    write_private(path, "new\n")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("new\n", 0o600)
