"""The tree and the page of public names, as ARCHITECTURE.md and docs/api.md promise them."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.support import ROOT

PACKAGE = ROOT / "src" / "deepvm"
MOST_MODULES = 12
MOST_LINES = 350
MODULES = sorted(PACKAGE.rglob("*.py"))
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


def test_no_module_is_long() -> None:
    long = {path.name: lines for path in MODULES if (lines := len(path.read_text().splitlines())) > MOST_LINES}
    assert long == {}


def test_no_class_has_its_name_twice_in_a_room() -> None:
    found = Counter(
        (path.relative_to(PACKAGE).parts[0], node.name)
        for path in MODULES
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    )
    assert [place for place, count in found.items() if count > 1] == []


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


def defined(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """What a module or a class defines: classes, functions and assigned names."""
    found: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
        elif isinstance(node, ast.Assign):
            found |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
    return found


def exists(dotted: str) -> bool:
    """True if ``package.module.Class.method`` is in the tree, by its source alone: importing it could need torch."""
    path, names = PACKAGE, dotted.split(".")
    while names and (path / names[0]).is_dir():
        path /= names.pop(0)
    if not names:
        return True
    module = path / f"{names[0]}.py"
    if not module.is_file():
        return False
    body = ast.parse(module.read_text(encoding="utf-8")).body
    for name in names[1:]:
        node = defined(body).get(name)
        if node is None:
            return False
        body = node.body if isinstance(node, ast.ClassDef) else []
    return True


def test_every_name_in_the_walks_of_architecture_exists() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    walks = page[page.index("## A save") : page.index("## Invariants")]
    named = re.findall(r"`([a-z_]+(?:\.\w+)+)`", walks)
    assert len(named) > 30
    assert [name for name in named if not exists(name)] == []


@pytest.mark.parametrize("name", ["plan.planner.nothing", "plan.nothing.plan", "plan.search.space.Space.nothing"])
def test_a_name_that_the_tree_lacks_is_noticed(name: str) -> None:
    assert not exists(name)
    assert exists("plan.search.space.Space.best")
