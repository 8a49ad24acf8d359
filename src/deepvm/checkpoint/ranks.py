"""Agreement of ranks. Input: a value of each rank. Output: all of them, or one error on every rank.

rank_agreement.py carries the values. Nothing is pickled.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from deepvm.checkpoint.rank_agreement import CREATING, Meetings, RanksDiverged, Verdict
from deepvm.errors import CheckpointError

__all__ = ["CREATING", "START_S", "STEP_S", "Meetings", "RanksDiverged", "Verdict"]

T = TypeVar("T")
STEP_S = 60.0  # how long rank 0 waits for others in a step: they have just exchanged gradients
START_S = 600.0  # ranks load models and data at different speeds


def rank_and_world_size() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def meet(
    what: str, value: Any = None, *, problem: object = None, deadline_s: float | None = None, gather: bool = False
) -> Verdict:
    """Return every rank's value, by rank, and the problems of those that failed. Values are JSON. With ``gather`` only
    rank 0 gets the others' values. Raises RanksDiverged if ranks do not meet."""
    text = None if problem is None else str(problem) or type(problem).__name__
    meetings = _current()
    if meetings is None:
        return Verdict(values=[value], problems={} if text is None else {0: text})
    return meetings.hold(what, value, text, STEP_S if deadline_s is None else deadline_s, gather)


def agree(
    what: str, work: Callable[[], T], *, report: Callable[[T], Any] = lambda _: None, deadline_s: float | None = None
) -> tuple[T, list[Any]]:
    """Do the work on every rank; return its result and what ``report`` makes of it on every rank. If it fails on one,
    raises on all: there its own error, elsewhere its text."""

    def work_and_report() -> tuple[T, Any]:
        result = work()
        return result, report(result)

    done, problem = attempt(work_and_report)
    verdict = meet(what, None if done is None else done[1], problem=problem, deadline_s=deadline_s)
    if problem is not None:
        raise problem
    if verdict.problems:
        raise CheckpointError(verdict.text())
    assert done is not None  # noqa: S101 - or it was raised
    return done[0], verdict.values


def attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return what the work returns, or its error, for the other ranks."""
    try:
        return work(), None
    except Exception as error:
        return None, error


def all_of(what: str, value: bool) -> bool:
    """True if it is True on every rank. A save that one rank skips is skipped by all."""
    return all(meet(what, value).values)


def any_of(what: str, value: bool, *, deadline_s: float | None = None) -> bool:
    """True if it is True on some rank: clocks differ, and a notice reaches one machine."""
    return any(meet(what, value, deadline_s=deadline_s).values)


def all_reduce_max(what: str, values: Sequence[int]) -> list[int]:
    """Return the largest of each over all ranks."""
    return [max(column) for column in zip(*meet(what, list(values)).values, strict=True)]


def broadcast_from_rank_0(what: str, value: Any, *, deadline_s: float | None = None) -> Any:
    return meet(what, value, deadline_s=deadline_s).values[0]


def gather_texts(what: str, text: str) -> list[str]:
    """Return every rank's text, by rank, on rank 0; [] on others."""
    return [str(one) for one in meet(what, text, gather=True).values]


def join() -> Meetings | None:
    """Join the meetings of the current process group, and ``leave`` them at the end. None if there is one rank only."""
    meetings = _current()
    if meetings is not None:
        meetings.enter()
    return meetings


@contextmanager
def within(meetings: Meetings | None) -> Iterator[None]:
    """Hold meetings of a process group that may have been destroyed."""
    global _bound
    before, _bound = _bound, meetings
    try:
        yield
    finally:
        _bound = before


_latest: Meetings | None = None
_bound: Meetings | None = None
_count = 0  # of groups of this process: two of them may have the same store


def _current() -> Meetings | None:
    """Return the meetings of the current process group; None if there is one rank only."""
    global _latest, _count
    if _bound is not None:
        return _bound
    rank, world_size = rank_and_world_size()
    if world_size == 1:
        return None
    if _latest is None or _latest.group is not dist.group.WORLD or _latest.pid != os.getpid():
        _count += 1
        _latest = Meetings(str(_count), rank, world_size)
    return _latest
