"""Which URL opens which store."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepvm.errors import UsageError
from deepvm.store import open_store, open_stores
from deepvm.store.files.store import FileStore
from deepvm.store.memory.store import MemoryStore


def test_directories_and_file_urls_open_the_same_store(tmp_path: Path) -> None:
    root = tmp_path / "with space"
    for url in (str(root), root, f"file://{tmp_path}/with%20space", f"file://localhost{tmp_path}/with%20space"):
        store = open_store(url)
        assert isinstance(store, FileStore)
        assert store.root == root
        assert open_store(store.url).url == store.url
        assert store.durable


def test_memory_urls_open_a_store_that_is_not_durable() -> None:
    store = open_store("memory://h1:7070,h2:7070?replicas=2", token="secret", key="key")
    assert isinstance(store, MemoryStore)
    assert (store.nodes, store.replicas, store.durable) == (("h1:7070", "h2:7070"), 2, False)
    assert "secret" not in store.url


@pytest.mark.parametrize("pace", [0, -1, 2**31])
def test_a_pace_that_no_connection_can_have_is_refused(pace: int) -> None:
    with pytest.raises(UsageError, match=f"pace is {pace}: it must be from 1 to 2147483647 bytes per second"):
        open_store(f"memory://h1:7070?pace={pace}")


def test_a_tier_is_opened_in_order(tmp_path: Path) -> None:
    near, far = open_stores(["memory://h1:7070", tmp_path])
    assert (near.durable, far.durable) == (False, True)
    assert [type(s) for s in open_stores(str(tmp_path))] == [FileStore]


@pytest.mark.parametrize(
    "url", ["", "ftp://host/x", "file://host/x", "file://", "s3://", "s3://key@bucket/x", "s3://bucket/x?y=1"]
)
def test_other_urls_are_refused_with_what_is_known(url: str) -> None:
    with pytest.raises(UsageError, match="://"):
        open_store(url)


def test_no_store_at_all_is_refused() -> None:
    with pytest.raises(UsageError, match="list of stores is empty"):
        open_stores([])
