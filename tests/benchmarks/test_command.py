"""The command of all benchmarks: it imports every one of them."""

from __future__ import annotations

import pytest

from benchmarks.__main__ import BENCHMARKS, main


def test_an_unknown_name_is_refused_with_all_that_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nonsense"]) == 2
    told = capsys.readouterr().err
    assert "'nonsense'" in told
    assert all(name in told for name in BENCHMARKS)
