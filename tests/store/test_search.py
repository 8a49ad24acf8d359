"""Which checkpoints are tried, and in which order."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepvm.errors import StoreUnavailable
from deepvm.store.files.store import FileStore
from deepvm.store.search import find_checkpoints
from tests.support.store.checkpoints import payload, save


class Unreachable(FileStore):
    def steps(self, run: str) -> list[int]:
        raise StoreUnavailable(f"no answer about {run}")


def test_the_newest_step_comes_first_and_of_equals_the_nearest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    near, silent, far = FileStore(tmp_path / "near"), Unreachable(tmp_path / "silent"), FileStore(tmp_path / "far")
    for store, steps in ((near, (1, 2)), (far, (2, 3))):
        for step in steps:
            save(store, payload(10), "run-a", step)
    found = find_checkpoints([near, silent, far], "run-a")
    assert found.candidates == [(3, 2), (2, 0), (2, 2), (1, 0)]
    assert found.steps == {near.url: [1, 2], far.url: [2, 3]}
    assert found.problems == [f"{silent.url}: no answer about run-a"]
    assert "cannot list checkpoints" in caplog.text
    assert find_checkpoints([near, far], "run-a", 2).candidates == [(2, 0), (2, 1)]
    assert find_checkpoints([near, far], "run-a", 9).candidates == []
