"""Hostile inputs by a coverage-guided fuzzer: no traceback, no hang, no growth. `make chaos` runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.fuzz_documents import TARGETS
from tests.fuzz.fuzzing import fuzz, needs_atheris

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1000), needs_atheris]


@pytest.mark.parametrize("name", TARGETS)
def test_no_input_is_more_than_refused(tmp_path: Path, name: str) -> None:
    target = TARGETS[name]
    fuzz(tmp_path, "fuzz_documents", name, target.seeds(), target.runs)
