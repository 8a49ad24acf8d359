"""What is printed as JSON, written to files, and remarked on old prices."""

from __future__ import annotations

import json
import math
from datetime import date
from pathlib import Path

import pytest

from deepvm.cli.render import json_text, price_age_note, print_json, safe, table, write_text
from deepvm.errors import UsageError


def test_json_keeps_printable_characters_and_escapes_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    document = {"cluster": "17 × g4dn", "bad": "\x1b[2J\x7f\u202e\x9b", "lines": "a\nb"}
    print_json(document)
    shown = capsys.readouterr().out
    assert shown == (
        '{\n  "cluster": "17 × g4dn",\n  "bad": "\\u001b[2J\\u007f\\u202e\\u009b",\n  "lines": "a\\nb"\n}\n'
    )
    assert json.loads(shown) == document


def test_json_of_a_file_is_ascii_and_has_null_for_what_is_not_finite() -> None:
    assert json_text({"×": 1}) == '{\n  "\\u00d7": 1\n}'
    document = {"a": [math.nan, (1.5, math.inf)], "b": {"c": -math.inf, "d": 0, "é": True}}
    assert json_text(document) == json.dumps({"a": [None, [1.5, None]], "b": {"c": None, "d": 0, "é": True}}, indent=2)
    assert json_text(document, ensure_ascii=False).endswith('"é": true\n  }\n}')


def test_untrusted_text_is_escaped_for_tables() -> None:
    assert safe("[red]\x1b[0m") == "\\[red]\\x1b[0m"


def test_columns_are_aligned_by_their_headings() -> None:
    made = table("t", "left", ">right", "")
    assert [(c.header, c.justify, c.overflow) for c in made.columns] == [
        ("left", "left", "fold"), ("right", "right", "fold"), ("", "left", "fold"),
    ]  # fmt: skip
    assert (made.title, made.title_justify, made.pad_edge) == ("t", "left", False)


def test_prices_are_old_after_a_month() -> None:
    seen = date(2026, 8, 1)
    notes = [price_age_note(seen, date(2026, month, day)) for month, day in ((8, 1), (9, 1), (9, 2))]
    assert notes == [
        None,
        None,
        "prices of 2026-08-01 are 32 days old: "
        "deepvm catalog update --source skypilot, then --catalog skypilot-aws, has today's",
    ]
    of_google = price_age_note(seen, date(2026, 9, 2), "gcp")
    assert of_google is not None
    assert "catalog update --source skypilot --provider gcp, then --catalog skypilot-gcp" in of_google


def test_files_are_written_as_they_are_or_refused(tmp_path: Path) -> None:
    write_text(tmp_path / "a.csv", "×,1\r\n2\n")
    assert (tmp_path / "a.csv").read_bytes() == "×,1\r\n2\n".encode()
    with pytest.raises(UsageError, match=r"b\.csv cannot be written: No such file or directory"):
        write_text(tmp_path / "missing" / "b.csv", "")
