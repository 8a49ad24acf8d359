"""The reproduction, made once for all tests that look at it."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepvm.catalog import load
from deepvm.paper import Reproduction, published, reference, reproduce
from deepvm.paper.sweeps import Sweeps, make_sweeps
from tests.support.drawings import recorded


@pytest.fixture(scope="session")
def made_and_drawn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Reproduction, dict[str, str]]:
    with recorded() as drawings:
        return reproduce(Path(tmp_path_factory.mktemp("reproduction"))), drawings


@pytest.fixture(scope="session")
def made(made_and_drawn: tuple[Reproduction, dict[str, str]]) -> Reproduction:
    return made_and_drawn[0]


@pytest.fixture(scope="session")
def drawings(made_and_drawn: tuple[Reproduction, dict[str, str]]) -> dict[str, str]:
    """Every figure of the reproduction as text, by its title."""
    return made_and_drawn[1]


@pytest.fixture(scope="session")
def sweeps() -> Sweeps:
    return make_sweeps(load("paper-virtual"))


@pytest.fixture(scope="session")
def virtual() -> published.Setting:
    return published.setting_of(
        load("paper-virtual"), checkpoint_bytes=reference.SWEEP_CHECKPOINT_BYTES, buffers=reference.BUFFERS
    )
