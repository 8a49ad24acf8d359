"""The tree and the page of public names, as ARCHITECTURE.md and docs/api.md promise them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.support import ROOT

PACKAGE = ROOT / "src" / "deepvm"
MOST_MODULES = 12
FOLDERS = sorted({path.parent for path in PACKAGE.rglob("*.py")})


def exported(init: Path) -> list[str]:
    """``__all__`` of a package; empty where there is none."""
    for node in ast.parse(init.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def packages() -> dict[str, list[str]]:
    inits = sorted(PACKAGE.rglob("__init__.py"))
    named = {".".join(init.parent.relative_to(PACKAGE.parent).parts): exported(init) for init in inits}
    return {name: names for name, names in named.items() if names}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(PACKAGE.parent)))
def test_a_folder_has_a_sentence_and_at_most_twelve_modules(folder: Path) -> None:
    modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
    assert len(modules) <= MOST_MODULES
    assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))


def test_the_page_of_public_names_lists_what_packages_export() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    listed: dict[str, list[str]] = {}
    for part in page.split("\n## ")[1:]:
        rows = [re.split(r"(?<!\\)\|", row) for row in part.splitlines() if row.startswith("| `")]
        assert all(len(row) == 5 and row[2].strip() and row[3].strip().startswith("`") for row in rows)
        listed[part.splitlines()[0]] = sorted(row[1].strip().strip("`") for row in rows)
    assert listed == {name: sorted(names) for name, names in packages().items()}


def test_architecture_names_every_folder() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    folders = [str(folder.relative_to(PACKAGE)) for folder in FOLDERS if folder != PACKAGE]
    backends = ("runtime/backends/",)  # one line for all of them
    missing = [name for name in folders if f"`{name}/`" not in page and not name.startswith(backends)]
    assert missing == []
