"""Frozen parameters: which bytes of one are copied at every save, and which only once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepvm.checkpoint.snapshot.frozen import _Watched

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
