from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from deepvm.fetch import segment_files
from deepvm.memnode import MemoryNode
from tests.support.fetcher import MIB, Fetcher

_numbers = itertools.count()


@pytest.fixture
def run() -> Iterator[str]:
    """A run of this test's own; afterwards nothing of it is left in shared memory."""
    name = f"test-{os.getpid()}-{next(_numbers)}"
    yield name
    left = segment_files.default_path(name).exists()
    segment_files.default_path(name).unlink(missing_ok=True)
    assert not left, f"{segment_files.default_path(name)} was left behind"


@pytest.fixture
def node_of(start_node: Callable[..., MemoryNode]) -> Callable[..., MemoryNode]:
    return partial(start_node, capacity_bytes=8 * MIB, limits={"flush_s": 1.0})


@pytest.fixture
def url(node_of: Callable[..., MemoryNode]) -> str:
    return f"memory://{node_of().address}"


@pytest.fixture
def fetch(run: str) -> Iterator[Callable[..., Fetcher]]:
    """Starts fetchers for this test's run; none outlives it."""
    started: list[Fetcher] = []

    def start(*words: str, **more: Any) -> Fetcher:
        fetcher = Fetcher(run, *words, **more)
        started.append(fetcher)
        return fetcher

    yield start
    for fetcher in started:
        if fetcher.process.poll() is None:
            fetcher.process.terminate()
            fetcher.end()
        for pipe in (fetcher.process.stdout, fetcher.process.stderr):
            if pipe is not None:
                pipe.close()
