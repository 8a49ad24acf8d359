"""One checkpoint in several stores."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from deepvm.errors import NotFound, StoreUnavailable
from deepvm.fetch.copies import Copies
from deepvm.store.base import Manifest
from deepvm.store.files.store import FileStore
from tests.support.store.checkpoints import CHUNK, payload, save

DATA = payload(8 * CHUNK)


class Silent(FileStore):
    """Has the manifest, and does not answer for chunks."""

    asked = 0

    def read_chunk(self, manifest: Manifest, chunk: int, into: memoryview) -> None:
        self.asked += 1
        raise StoreUnavailable(f"no answer for chunk {chunk} of {len(into)} bytes, step {manifest.step}")


def test_a_store_that_does_not_answer_is_asked_last_from_then_on(tmp_path: Path) -> None:
    silent, good = Silent(tmp_path / "silent"), FileStore(tmp_path / "good")
    for store in (silent, good):
        save(store, DATA)
    copies = Copies(good.manifest("run-a", 1), [silent, good], {})
    into = memoryview(bytearray(CHUNK))
    for chunk in range(3):
        copies.read(chunk, into)
        assert into == DATA[chunk * CHUNK : (chunk + 1) * CHUNK]
    assert silent.asked == 1
    assert list(copies.used) == [good.url]
    assert len(copies.problems) == 1


def test_threads_find_every_chunk_while_a_store_is_moved_to_the_end(tmp_path: Path) -> None:
    silent, good = Silent(tmp_path / "silent"), FileStore(tmp_path / "good")
    for store in (silent, good):
        save(store, DATA)
    copies = Copies(good.manifest("run-a", 1), [silent, good], {})
    failures: list[BaseException] = []

    def read(chunk: int) -> None:
        try:
            copies.read(chunk, memoryview(bytearray(CHUNK)))
        except StoreUnavailable as error:
            failures.append(error)

    threads = [threading.Thread(target=read, args=(chunk,)) for chunk in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failures


def test_a_store_with_other_bytes_for_the_step_is_not_read(tmp_path: Path) -> None:
    first, other = FileStore(tmp_path / "first"), FileStore(tmp_path / "other")
    save(first, DATA)
    save(other, payload(8 * CHUNK, seed=1))
    copies = Copies(first.manifest("run-a", 1), [other], {})
    with pytest.raises(NotFound, match="other bytes"):
        copies.read(0, memoryview(bytearray(CHUNK)))
