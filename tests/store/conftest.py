"""One place per kind of store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from places import FilePlace, Place

from deepvm.store import Store


@pytest.fixture(params=["files"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return FilePlace(tmp_path / "kept")


@pytest.fixture
def store(place: Place) -> Iterator[Store]:
    opened = place.open()
    yield opened
    opened.close()
