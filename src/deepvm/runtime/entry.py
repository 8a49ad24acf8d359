"""The words after ``--`` -> a script or a module, and its arguments."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from deepvm.errors import UsageError

_PYTHON = re.compile(r"pythonw?(\d+(\.\d+)*)?\Z")
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "mpirun", "srun")
_HARMLESS = ("-u",)  # workers write line by line in any case


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    script: str  # a file, or a module's name
    args: tuple[str, ...] = ()
    module: bool = False

    def check(self, folder: str) -> None:
        """Raise UsageError if the script or module does not exist, seen from ``folder``."""
        if self.module:
            _check_module(self.script, folder)
        else:
            _check_script(Path(folder, self.script))


def parse_entry(words: Sequence[str]) -> Entry:
    """Read ``train.py ARGS``, ``-m package.train ARGS``, ``python train.py ARGS`` or ``python -m package.train
    ARGS``."""
    left = list(words)
    if left and _PYTHON.match(os.path.basename(left[0])):
        left.pop(0)
        while left and left[0] in _HARMLESS:
            left.pop(0)
        if left and left[0].startswith("-") and left[0] != "-m":
            raise UsageError(
                f"python {left[0]}: workers are forked from a running interpreter; leave out its options, or set "
                "environment variables (PYTHONOPTIMIZE=1 for -O)"
            )
    elif left and os.path.basename(left[0]) in _LAUNCHERS:
        raise UsageError(f"{left[0]}: deepvm run starts the workers itself; write the script alone, as -- train.py")
    module = bool(left) and left[0] == "-m"
    if module:
        left.pop(0)
    if not left:
        raise UsageError("nothing to run after --: write -- train.py ARGS, or -- -m package.train ARGS")
    return Entry(script=left[0], args=tuple(left[1:]), module=module)


def _check_script(path: Path) -> None:
    if not path.is_file():
        raise UsageError(f"script {path.name!r} not found in {path.parent}: write it after --, as -- train.py ARGS")
    try:
        with path.open("rb") as file:
            first = file.readline(200)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
    if first.startswith(b"\x7fELF") or (first.startswith(b"#!") and b"python" not in first):
        raise UsageError(f"{path} is not a Python script: deepvm run starts workers in Python, as -- train.py ARGS")


def _check_module(name: str, folder: str) -> None:
    path: Sequence[str] | None = None
    spec: ModuleSpec | None = None
    found = ""
    for part in name.split("."):
        found = f"{found}.{part}" if found else part
        spec = PathFinder.find_spec(found, [folder, *sys.path] if path is None else path)
        if spec is None and path is None:
            spec = _known(part)
        if spec is None:
            raise UsageError(f"module {found!r} not found in {folder} or sys.path: write it as -- -m package.train")
        path = list(spec.submodule_search_locations or ())
    if path and PathFinder.find_spec(f"{name}.__main__", path) is None:
        raise UsageError(f"{name} is a package without __main__.py: name one of its modules, as -- -m {name}.train")


def _known(top: str) -> ModuleSpec | None:
    """Find a top-level module through other finders, as an editable install has one."""
    try:
        return importlib.util.find_spec(top) if top.isidentifier() else None
    except (ImportError, ValueError):
        return None
