"""`python -m tools.coverage COMMAND...`: run a command with every statement and branch of deepvm recorded, and report.

Processes that the command starts count too, also those that are killed. Prints the share and the worst modules; all
modules and their missed lines go to `.hits/report.txt`. The exit code is the command's.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tools.recorder import Recorder

_ROOT = Path(__file__).parents[1]
_FOLDER = _ROOT / ".hits"
_WORST = 10


@dataclass
class Counted:
    """Statements and branches of one module; `missed` are lines, with `->` for a branch that was never taken."""

    name: str
    total: int = 0
    missed: list[str] = field(default_factory=list)

    @property
    def share(self) -> float:
        return 1 - len(self.missed) / self.total if self.total else 1.0


def count(name: str, text: str, ran: set[int], others: set[int]) -> Counted:
    """Compare what a module has with the lines that ran and the branches without statements that were taken."""
    counted = Counted(name)
    for statement in _statements(ast.parse(text)):
        line = statement.lineno
        wanted = {str(line): line in ran}
        endless = isinstance(statement, ast.While) and isinstance(statement.test, ast.Constant)
        if isinstance(statement, (ast.If, ast.While, ast.For, ast.AsyncFor)) and not endless:
            wanted[f"{line}->{statement.body[0].lineno}"] = statement.body[0].lineno in ran
            if statement.orelse:
                wanted[f"{line}->{statement.orelse[0].lineno}"] = statement.orelse[0].lineno in ran
            else:
                wanted[f"{line}->after"] = line in others
        counted.total += len(wanted)
        counted.missed += [place for place, was_run in wanted.items() if not was_run]
    return counted


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield the statements of all functions that do something."""
    protocols = {
        id(member)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in node.bases)
        for member in node.body
    }
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)) and id(function) not in protocols:
            yield from _inside(function.body)


def _inside(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not (constant or isinstance(node, (ast.Global, ast.Nonlocal))):
            yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            for name in ("body", "orelse", "finalbody"):
                yield from _inside(getattr(node, name, []))
            for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
                yield from _inside(part.body)


def main(command: list[str]) -> int:
    """Run the command, print the report, and return its exit code."""
    recorder = Recorder(_FOLDER, _ROOT / "src")
    path = os.pathsep.join(filter(None, [str(_FOLDER), os.environ.get("PYTHONPATH")]))
    code = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=False).returncode
    hits = recorder.lines((_FOLDER / "hits").read_bytes())
    modules = []
    for name in recorder.offsets:
        ran, others = hits.get(name, ([], []))
        text = Path(name).read_text(encoding="utf-8")
        modules.append(count(str(Path(name).relative_to(_ROOT / "src")), text, set(ran), set(others)))
    print(report(modules))
    return code


def report(modules: list[Counted]) -> str:
    """Write all modules to the report's file; return the share of all and the worst."""
    modules = sorted(modules, key=lambda module: len(module.missed), reverse=True)
    lines = [f"{module.share:7.1%} of {module.total:4}  {module.name}  {' '.join(module.missed)}" for module in modules]
    (_FOLDER / "report.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    total, missed = sum(module.total for module in modules), sum(len(module.missed) for module in modules)
    worst = [f"  {module.share:6.1%}, {len(module.missed)} missed  {module.name}" for module in modules[:_WORST]]
    return "\n".join(
        [f"coverage: {1 - missed / total:.1%} of {total} statements and branches (.hits/report.txt); worst:", *worst]
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
