"""A text and a file of the repository: both must be the same. ``SCREENS=write`` writes the file anew."""

from __future__ import annotations

import os
import re
from pathlib import Path

_EXACT = re.compile(r"-?\d+\.\d{8,}(e[-+]?\d+)?")


def same_as_file(text: str, file: Path) -> None:
    """Compare line by line; spaces at the ends of lines do not count."""
    text = "".join(line.rstrip() + "\n" for line in text.splitlines())
    if os.environ.get("SCREENS") == "write":
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


def rounded(text: str) -> str:
    """Round numbers that are written in full to six digits, so that no library's last bit counts."""
    return _EXACT.sub(lambda found: f"{float(found[0]):.6g}", text)
