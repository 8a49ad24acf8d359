"""The memory that a restore reads into: of a machine that has none, it says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deepvm.checkpoint.restore import prefetched
from deepvm.errors import StoreUnavailable
from deepvm.store.base import Manifest, MappedBytes
from deepvm.store.files.store import FileStore
from tests.support.store.checkpoints import manifest_of, payload


class Unmapped(FileStore):
    """As on a network's file system: nothing of it can be mapped."""

    def map(self, manifest: Manifest) -> MappedBytes | None:
        return None


@pytest.mark.parametrize("error", [MemoryError("no memory"), OSError(12, "no memory"), OverflowError("no memory")])
def test_a_checkpoint_larger_than_the_memory_is_unavailable_with_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(prefetched, "Staging", fails)
    with pytest.raises(
        StoreUnavailable, match=r"step 7 needs 100 kB of memory, which this machine does not have: .*no"
    ):
        prefetched.open_source(Unmapped(tmp_path), manifest_of(payload(100_000), "run-a", 7))


def test_a_store_that_cannot_map_is_read_into_new_memory(tmp_path: Path) -> None:
    memory, source = prefetched.open_source(Unmapped(tmp_path), manifest_of(payload(100_000), "run-a", 7))
    assert memory.size_bytes >= 100_000
    assert memory.own
    assert type(source).__name__ == "StoreSource"
