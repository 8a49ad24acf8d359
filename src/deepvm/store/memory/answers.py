"""Check what a memory node answers, for store.py: untrusted meta and bodies in, values out, or a StoreError."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from deepvm import strict_json as strict
from deepvm.errors import Corrupt, StoreError, UsageError
from deepvm.protocol.frames import MOST_DOCUMENT_BYTES
from deepvm.store.base import MOST_STEP, check_run

_MOST_DEPTH = 501  # a list of states


@contextmanager
def _readable(node: str) -> Iterator[None]:
    try:
        yield
    except (strict.MalformedJson, UsageError) as error:
        raise StoreError(f"the answer of memory node {node} cannot be read: {error}") from None


def run_names(answer: Mapping[str, Any], node: str) -> list[str]:
    with _readable(node):
        return [check_run(run) for run in strict.array(strict.member(answer, "runs"), "runs")]


def step_rows(answer: Mapping[str, Any], node: str) -> list[dict[str, Any]]:
    """Check the answer to STEPS."""
    with _readable(node):
        rows = strict.array(strict.member(answer, "steps"), "steps")
        for row in rows:
            strict.integer(strict.member(strict.table(row, "a step"), "step"), "step", 0, MOST_STEP)
            strict.text(strict.member(row, "state"), "state", 100)
            if not isinstance(row.get("whole", False), bool):
                raise strict.MalformedJson(f"whole is {strict.brief(row['whole'])}, not true or false")
        return rows


def list_version(answer: Mapping[str, Any], node: str) -> int:
    """Check the answer to STEPS; return the version of the node's list."""
    with _readable(node):
        return strict.integer(strict.member(answer, "version"), "version", 0, MOST_STEP)


def rank_states(body: bytes, world_size: int, node: str) -> list[object]:
    try:
        found = strict.loads(body, most_bytes=MOST_DOCUMENT_BYTES, most_depth=_MOST_DEPTH)
        return strict.array(found, "the list", world_size)
    except strict.MalformedJson as error:
        raise Corrupt(f"the ranks' own states on memory node {node} cannot be read: {error}") from None
