"""``deepvm checkpoint verify --replay``: a checkpoint and the user's model in, the problem of its replay out."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from deepvm.errors import CheckpointError, MissingExtra, UsageError
from deepvm.store import Store

_FORM = "write it as train.py:function; the function returns the state and a function that makes one step"


def replay(store: Store, run: str, step: int, spec: str) -> str | None:
    """Restore, make the next step, compare. Return the problem, or None if the step is identical. ``spec`` is
    FILE:FUNCTION; the function returns the state and a function that makes one step."""
    try:
        from deepvm.checkpoint import Checkpointer
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtra("--replay", "train") from None
    with redirect_stdout(sys.stderr):  # keep the user's prints out of our output
        state, make_step = _build(spec)
        with Checkpointer(state, store, run=run, replay=make_step) as checkpointer:
            try:
                checkpointer.restore(step, verify="replay")
            except CheckpointError as error:
                drift = "; ".join(checkpointer.status().drift)
                return f"{error}" + (f" (in a different environment: {drift})" if drift else "")
    return None


def _build(spec: str) -> tuple[Mapping[str, Any], Callable[[], object]]:
    path, _, name = spec.rpartition(":")
    file = Path(path)
    if not path or not name.isidentifier() or not file.is_file():
        raise UsageError(f"--replay {spec!r} does not name a function in a file: {_FORM}")
    sys.path.insert(0, str(file.resolve().parent))  # as if started from there
    described = importlib.util.spec_from_file_location(file.stem, file)
    if described is None or described.loader is None:
        raise UsageError(f"{file} is not a Python file: {_FORM}")
    module = importlib.util.module_from_spec(described)
    sys.modules[described.name] = module
    described.loader.exec_module(module)
    build = getattr(module, name, None)
    if not callable(build):
        raise UsageError(f"{file} has no function {name}: {_FORM}")
    built = build()
    if not (isinstance(built, tuple) and len(built) == 2 and isinstance(built[0], Mapping) and callable(built[1])):
        raise UsageError(f"{name} in {file} returned {type(built).__qualname__}: {_FORM}")
    return built
