"""Find the checkpoints of a run: its stores, nearest first -> the candidates to try, newest first.

``checkpoint.restore``, ``checkpoint.dcp`` and ``fetch.pull`` try candidates in this order.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from deepvm.errors import StoreError
from deepvm.store.base import Store

log = logging.getLogger("deepvm.store")


@dataclass(frozen=True, kw_only=True)
class FoundCheckpoints:
    candidates: list[tuple[int, int]]  # step, index of the store: newest first, then nearest first
    steps: dict[str, list[int]]  # of each store that answered, by URL
    problems: list[str]  # of those that did not


def find_checkpoints(stores: Sequence[Store], run: str, step: int | None = None) -> FoundCheckpoints:
    """Ask every store for its steps. With ``step``, only that one is a candidate."""
    steps: dict[str, list[int]] = {}
    candidates: list[tuple[int, int]] = []
    problems: list[str] = []
    for index, store in enumerate(stores):
        try:
            steps[store.url] = store.steps(run)
        except StoreError as error:
            problems.append(f"{store.url}: {error}")
            log.warning("cannot list checkpoints in %s", problems[-1])
        else:
            candidates += [(found, index) for found in steps[store.url] if step in (None, found)]
    candidates.sort(key=lambda candidate: (-candidate[0], candidate[1]))
    return FoundCheckpoints(candidates=candidates, steps=steps, problems=problems)
