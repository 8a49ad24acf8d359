"""Fresh memory in the pages that are the fastest to have."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from deepvm.checkpoint.buffers import fresh_pages
from deepvm.checkpoint.buffers.fresh_pages import EXTENT_BYTES, LOOK_AGAIN, PageChoice
from deepvm.checkpoint.buffers.staging import Staging


def _taken(cost_s: Callable[[bool, int], float], extents: int) -> list[bool]:
    """Which pages are taken, where an extent costs what is told for its kind and number."""
    choice, kinds = PageChoice(), []
    for number in range(extents):
        kinds.append(choice.huge())
        choice.record(huge=kinds[-1], seconds=cost_s(kinds[-1], number))
    return kinds


def test_both_sizes_are_tried_and_the_faster_one_is_taken() -> None:
    assert _taken(lambda huge, _: 0.4 if huge else 1.5, 10) == [True, False, *[True] * 8]
    assert _taken(lambda huge, _: 9.0 if huge else 1.5, 10) == [True, False, *[False] * 8]


def test_when_huge_pages_become_slow_the_next_ones_are_small_and_the_other_way_round() -> None:
    kinds = _taken(lambda huge, n: 1.5 if not huge else 0.4 if n < 20 else 9.0, 40)
    assert all(kinds[2:20])
    assert not any(kinds[22:])
    kinds = _taken(lambda huge, n: 1.5 if not huge else 9.0 if n < 5 else 0.4, 20 * LOOK_AGAIN)
    assert all(kinds[-LOOK_AGAIN + 2 : -1])  # found by looking again


def test_looking_again_costs_little() -> None:
    kinds = _taken(lambda huge, _: 9.0 if huge else 1.5, 10 * LOOK_AGAIN)
    assert sum(kinds) <= 11


def test_threads_take_every_extent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    staging = Staging(8 * EXTENT_BYTES, warm=False)
    taken: list[int] = []
    real = fresh_pages.FreshPages._take

    def counted(self: fresh_pages.FreshPages, at: int, huge: bool, unused: bool) -> None:
        taken.append(at)
        real(self, at, huge, unused)

    monkeypatch.setattr(fresh_pages.FreshPages, "_take", counted)
    threads = [threading.Thread(target=staging.touch, args=(0, staging.size_bytes)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(taken) == len(set(taken)) >= 8


@pytest.mark.parametrize("populates", [True, False])
def test_what_is_written_before_its_extent_is_taken_stays(monkeypatch: pytest.MonkeyPatch, populates: bool) -> None:
    """A reader may be faster than the one that takes the memory for it."""
    if not populates:  # an older kernel
        real = fresh_pages._advise
        monkeypatch.setattr(fresh_pages, "_advise", lambda s, e, how: how != 23 and real(s, e, how))
    staging = Staging(2 * EXTENT_BYTES, warm=False)
    staging.view[5] = 42
    staging.touch(0, staging.size_bytes)
    assert staging.view[5] == 42


def test_it_ends_where_it_may_not_continue() -> None:
    staging = Staging(4 * EXTENT_BYTES, warm=False)
    left = iter([True, False])
    staging.warm(staging.size_bytes, lambda: next(left))
    assert sum(staging._fresh._taken) == 1  # type: ignore[union-attr]


def test_an_older_kernel_is_made_to_have_memory_that_nobody_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fresh_pages._advise
    monkeypatch.setattr(fresh_pages, "_advise", lambda s, e, how: how != 23 and real(s, e, how))
    before = _resident_bytes()
    staging = Staging(8 * EXTENT_BYTES)
    assert _resident_bytes() - before >= 7 * EXTENT_BYTES
    assert not any(staging.view[:100])


@pytest.mark.parametrize("huge", [True, False])
def test_memory_in_any_pages_is_one_mapping(monkeypatch: pytest.MonkeyPatch, huge: bool) -> None:
    """A process may have 65,530 of them."""
    monkeypatch.setattr(PageChoice, "huge", lambda self: huge)
    before = len(Path("/proc/self/maps").read_text().splitlines())
    staging = Staging(24 * EXTENT_BYTES)
    assert len(Path("/proc/self/maps").read_text().splitlines()) - before <= 3
    assert staging.size_bytes == 24 * EXTENT_BYTES


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * fresh_pages.PAGE_BYTES
