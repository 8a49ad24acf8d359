"""Frozen parameters: which bytes of one are copied at every save, and which only once."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepvm.checkpoint.snapshot import frozen, live_pages
from deepvm.checkpoint.snapshot.frozen import _Watched
from deepvm.checkpoint.snapshot.live_tensors import LiveTensors
from deepvm.errors import CheckpointError

PAGE, TO = 4096, 1 << 40


@pytest.mark.parametrize(
    ("pages", "copied"),
    [
        ([], [(0, 5 * PAGE)]),
        ([(0, 5 * PAGE)], []),
        ([(0, PAGE), (PAGE, 5 * PAGE)], []),
        ([(PAGE, 2 * PAGE), (3 * PAGE, 4 * PAGE)], [(0, PAGE), (2 * PAGE, PAGE), (4 * PAGE, PAGE)]),
        ([(0, PAGE), (4 * PAGE, 5 * PAGE)], [(PAGE, 3 * PAGE)]),
    ],
)
def test_what_is_not_protected_is_copied_at_every_save(
    pages: list[tuple[int, int]], copied: list[tuple[int, int]]
) -> None:
    tensor = torch.zeros(5 * PAGE, dtype=torch.uint8)
    at, no_watch = tensor.data_ptr(), None
    watch: Any = no_watch
    watched = _Watched(watch, tensor, [(at + start, at + end) for start, end in pages])
    assert watched.edges(TO) == [(TO + start, at + start, length) for start, length in copied]


def test_whoever_watches_pages_gives_all_of_them_back() -> None:
    calls: list[object] = []
    watch: Any = SimpleNamespace(unregister=lambda *run: calls.append(run), disclaim=calls.append)
    ended = threading.Event()
    live_pages._release(watch, "me", [(0, PAGE), (PAGE, 3 * PAGE)], ended)
    assert calls == [(0, PAGE), (PAGE, 3 * PAGE), "me"]
    assert ended.is_set()
    calls.clear()
    tensor = torch.zeros(PAGE, dtype=torch.uint8)
    watched = {"w": _Watched(watch, tensor, [(PAGE, 2 * PAGE)])}
    frozen._release(watch, "me", watched)
    assert (calls, watched) == ([(PAGE, 2 * PAGE), "me"], {})
    frozen._release(None, "me", {})


def test_pages_that_were_given_back_are_not_protected_again() -> None:
    pages: Any = live_pages.LivePages.__new__(live_pages.LivePages)
    pages.close = SimpleNamespace(alive=False)
    assert pages.protect() == ()


def test_a_save_that_is_given_up_waits_for_its_copies_and_unprotects_whatever_they_say() -> None:
    calls: list[object] = []

    def finish(work: object) -> None:
        calls.append(work)
        raise CheckpointError("a copy failed")

    live: Any = LiveTensors.__new__(LiveTensors)
    live._copying, live._copier = "copies", SimpleNamespace(finish=finish)
    live.pages = SimpleNamespace(unprotect=lambda: calls.append("unprotected"))
    live.abandon()
    live.abandon()
    assert calls == ["copies", "unprotected", "unprotected"]
