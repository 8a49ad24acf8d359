"""Where the repository is, and a folder for what a benchmark writes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.common import peers

REPOSITORY = Path(__file__).parents[2]


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make a folder on a disk, not in /tmp, which may be memory; remove it at the end."""
    path = peers.cache() / f"scratch-{os.getpid()}"
    path.mkdir(parents=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
