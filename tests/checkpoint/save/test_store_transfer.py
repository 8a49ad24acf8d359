"""Saves into a store without memory nodes: rank 0 writes, and the others wait until it has."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from deepvm.checkpoint.handle import SaveHandle
from deepvm.checkpoint.save.save_job import SaveJob, save_name
from deepvm.checkpoint.save.store_transfer import StoreTransfer
from deepvm.errors import StoreUnavailable
from deepvm.store.base import Manifest
from deepvm.store.files.store import FileStore
from tests.support.store.checkpoints import CHUNK, manifest_of, payload, put
from tests.support.waiting import wait_until

RUN, SESSION = "run-a", "session"


class Counting(FileStore):
    """Counts how often it was asked for a manifest."""

    asked = 0

    def manifest(self, run: str, step: int) -> Manifest:
        self.asked += 1
        return super().manifest(run, step)


def job(ends_s: float) -> SaveJob:
    snapshot: Any = SimpleNamespace(chunk_map=None)  # rank 0 alone reads it
    return SaveJob(handle=SaveHandle(1), snapshot=snapshot, plain_values="", ends_s=ends_s)


def commit(store: FileStore, name: str) -> None:
    data = payload(3 * CHUNK)
    manifest = manifest_of(data, RUN, 1, facts={"save": name})
    writer = store.writer(RUN, 1, size_bytes=len(data), chunk_bytes=CHUNK)
    put(writer, data, manifest, range(3))
    writer.publish(manifest)


def test_a_rank_other_than_the_first_returns_when_this_very_save_is_committed(tmp_path: Path) -> None:
    store = Counting(tmp_path)
    commit(store, save_name("an earlier session", 0))
    given = job(time.monotonic() + 60)
    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(StoreTransfer(store, RUN, 1, 2, SESSION).save, given)
        wait_until(lambda: store.asked >= 2 or saving.done(), "it waits")
        assert not saving.done()
        assert given.handle.state == "staged", "its optimizer need not wait"
        commit(store, save_name(SESSION, 0))
        saving.result(10)


def test_a_rank_that_sees_no_commit_in_time_says_what_may_be_wrong(tmp_path: Path) -> None:
    transfer = StoreTransfer(cast("Any", FileStore(tmp_path)), RUN, 1, 2, SESSION)
    with pytest.raises(
        StoreUnavailable, match="rank 0 did not write step 1 within its deadline, or ranks do not share"
    ):
        transfer.save(job(time.monotonic() - 1))
