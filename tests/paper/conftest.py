"""The reproduction, made once for all tests that look at it."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepvm.catalog import load
from deepvm.paper import Reproduction, published, reference, reproduce
from deepvm.paper.sweeps import Sweeps, make_sweeps


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Reproduction:
    return reproduce(Path(tmp_path_factory.mktemp("reproduction")))


@pytest.fixture(scope="session")
def sweeps() -> Sweeps:
    return make_sweeps(load("paper-virtual"))


@pytest.fixture(scope="session")
def virtual() -> published.Setting:
    return published.setting_of(
        load("paper-virtual"), checkpoint_bytes=reference.SWEEP_CHECKPOINT_BYTES, buffers=reference.BUFFERS
    )
