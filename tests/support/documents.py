"""Whole JSON documents, compared with files that tests keep: every name, every figure and their order.

After a change that is meant, ``DOCUMENTS=write pytest tests/plan`` writes the files anew. Read the difference.
"""

from __future__ import annotations

import json
import math
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

_WIDTH = 116


def assert_document(found: Any, path: Path, *, within: float = 1e-6) -> None:
    """Compare a document with its file. Figures may differ by a share of this, as sums of floats and fits do."""
    document = json.loads(json.dumps(found, allow_nan=False))
    if os.environ.get("DOCUMENTS") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(_text(_rounded(document)) + "\n", encoding="utf-8")
    differences = list(_differences(document, json.loads(path.read_text(encoding="utf-8")), "", within))
    assert not differences, "\n".join(differences[:20])


def _differences(found: Any, kept: Any, at: str, within: float) -> list[str]:
    if isinstance(found, dict) and isinstance(kept, dict):
        if list(found) != list(kept):
            return [f"{at}: names are {list(found)}, not {list(kept)}"]
        return [each for name in kept for each in _differences(found[name], kept[name], f"{at}.{name}", within)]
    if isinstance(found, list) and isinstance(kept, list):
        if len(found) != len(kept):
            return [f"{at}: {len(found)} entries, not {len(kept)}"]
        pairs = enumerate(zip(found, kept, strict=True))
        return [each for i, (ours, theirs) in pairs for each in _differences(ours, theirs, f"{at}[{i}]", within)]
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (found, kept))
    same = math.isclose(found, kept, rel_tol=within, abs_tol=within * 1e-3) if numbers else found == kept
    return [] if same and isinstance(found, bool) == isinstance(kept, bool) else [f"{at}: {found!r}, not {kept!r}"]


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def _text(value: Any, indent: str = "") -> str:
    """Return JSON in which lines are filled."""
    text = json.dumps(value, ensure_ascii=False)
    if len(text) + len(indent) <= _WIDTH or not isinstance(value, dict | list):
        return text
    inner = indent + " "
    if isinstance(value, dict):
        parts = [f"{json.dumps(name, ensure_ascii=False)}: {_text(each, inner)}" for name, each in value.items()]
    else:
        parts = [_text(each, inner) for each in value]
    lines = [parts[0]]
    for before, part in pairwise(parts):
        if "\n" in before + part or len(inner + lines[-1] + part) > _WIDTH:
            lines.append(part)
        else:
            lines[-1] += f", {part}"
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}\n{inner}" + f",\n{inner}".join(lines) + f"\n{indent}{closing}"
