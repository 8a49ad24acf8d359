"""A file system of two megabytes, for what happens when it is full."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    where = tmp_path / "small"
    where.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", where], capture_output=True, timeout=10)
    if mounted.returncode:
        pytest.skip("a small file system cannot be mounted here: " + mounted.stderr.decode().strip())
    yield where
    subprocess.run(["umount", "-l", where], check=True, timeout=10)


def fill(disk: Path) -> Path:
    """Take all the room that is left, to the last block."""
    filler = disk / ".filler"
    with filler.open("ab", buffering=0) as file:
        for piece in (2**16, 4096, 1):
            while True:
                try:
                    if not file.write(b"x" * piece):
                        break
                except OSError:
                    break
    return filler
