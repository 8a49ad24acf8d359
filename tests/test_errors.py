"""Errors: their sentences, exit codes, and what they keep."""

from __future__ import annotations

import pytest

from deepvm.errors import (
    DeepvmError,
    Infeasible,
    MalformedFile,
    MissingExtra,
    UnknownName,
    UsageError,
    describe,
    listed,
)


@pytest.mark.parametrize(
    ("name", "known", "hint"),
    [
        ("tierin", ["tiering", "all-spot"], "did you mean tiering?"),
        ("TIERIN", ["Tiering"], "did you mean Tiering?"),
        ("ab1", ["ab2", "ab3", "xyz"], "did you mean ab3 or ab2?"),
        ("q", ["b", "a", "b"], "known: a, b"),
        ("q", [f"n{number:02}" for number in range(12)], "known: " + ", ".join(f"n{n:02}" for n in range(12))),
        ("q", [f"n{number:02}" for number in range(13)], "13 are known, none like it"),
        ("q", [], "there are none yet"),
    ],
)
def test_an_unknown_name_is_told_with_what_is_like_it(name: str, known: list[str], hint: str) -> None:
    error = UnknownName("thing", name, known)
    assert str(error) == f"no thing is called {name!r}: {hint}"
    assert (error.kind, error.name, error.known, error.exit_code) == ("thing", name, sorted(set(known)), 2)


def test_files_prices_and_extras() -> None:
    assert str(MalformedFile("a.json", "not JSON")) == "a.json: not JSON"
    at_line = MalformedFile("a.json", "not JSON", line=3)
    assert (str(at_line), at_line.path, at_line.line) == ("a.json, line 3: not JSON", "a.json", 3)
    infeasible = Infeasible("too dear", cheapest_usd=0.5)
    assert (str(infeasible), infeasible.cheapest_usd, infeasible.exit_code) == ("too dear", 0.5, 3)
    assert Infeasible("never").cheapest_usd is None
    assert str(MissingExtra("a figure", "figures")) == "a figure needs an optional part: pip install 'deepvm[figures]'"
    assert (DeepvmError("x").exit_code, UsageError("x").exit_code) == (1, 2)


def test_texts_are_printable_and_bounded() -> None:
    assert str(DeepvmError("a\x1b[2J")) == "a\\x1b[2J"
    assert describe(UsageError("no")) == "no"
    assert describe(ValueError("no")) == "ValueError: no"
    names = [str(number) for number in range(10)]
    assert listed(names[:8]) == "0; 1; 2; 3; 4; 5; 6; 7"
    assert listed(names) == "0; 1; 2; 3; 4; 5; 6; 7 and 2 more"
    assert listed(names, ", ", most=2) == "0, 1 and 8 more"
