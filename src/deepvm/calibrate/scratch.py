"""A private folder for the files of a calibration, removed at its end. The next one removes what a killed one left."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deepvm.errors import UsageError

_PREFIX = "deepvm-calibrate-"
_OURS = re.compile(rf"{_PREFIX}(\d+)-")


@contextmanager
def scratch_folder(parent: Path | None = None) -> Iterator[Path]:
    """Yield an empty folder below ``parent`` (the folder for temporary files unless given)."""
    below = Path(tempfile.gettempdir()) if parent is None else parent
    try:
        below.mkdir(parents=True, exist_ok=True)
        _sweep(below)
        path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=below))
    except OSError as error:
        raise UsageError(f"no folder can be created in {below}: {error.strerror or error}") from None
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _sweep(below: Path) -> None:
    for path in below.iterdir():
        found = _OURS.match(path.name)
        if found and not Path(f"/proc/{found[1]}").exists():
            shutil.rmtree(path, ignore_errors=True)
