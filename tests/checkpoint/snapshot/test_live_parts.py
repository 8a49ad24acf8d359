"""Each byte of a tensor is read where it is or copied to its place in staging memory, and none is both."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from deepvm.checkpoint.snapshot.live_parts import LiveParts, Part

PAGE, CHUNK, STAGING = 4096, 4 * 4096, 1 << 40


def parts_of(tensor: Part, *protected: tuple[int, int]) -> LiveParts:
    chunk_map: Any = SimpleNamespace(count=8, chunk_bytes=CHUNK)
    staging: Any = SimpleNamespace(address=STAGING)
    return LiveParts(chunk_map, staging, [tensor], protected)


def test_without_a_protected_page_all_of_a_tensor_is_copied_to_its_place() -> None:
    found = parts_of(Part(offset=100, address=50 * PAGE + 7, length=9 * PAGE))
    assert found.rest == [(STAGING + 100, 50 * PAGE + 7, 9 * PAGE)]
    assert found.bytes == 0
    assert not any(found.in_chunk)


@pytest.mark.parametrize("protected", [(40, 70), (52, 55), (50, 58), (51, 52)])
def test_protected_pages_are_read_in_place_and_the_rest_is_copied(protected: tuple[int, int]) -> None:
    tensor = Part(offset=100, address=50 * PAGE + 7, length=9 * PAGE)
    first, last = max(51, protected[0]) * PAGE, min(59, protected[1]) * PAGE  # whole pages of the tensor alone
    found = parts_of(tensor, (protected[0] * PAGE, protected[1] * PAGE))
    in_place = [part for parts in found.parts for part in parts]
    assert found.bytes == last - first
    assert [part.address for part in in_place] == sorted(part.address for part in in_place)
    shift = tensor.address - tensor.offset
    covered = []
    for offset, address, length in in_place:
        assert address - offset == shift
        assert offset // CHUNK == (offset + length - 1) // CHUNK, "it is of one chunk"
        assert first <= address < address + length <= last
        covered.append((address, address + length))
    for to, source, length in found.rest:
        assert source - (to - STAGING) == shift
        covered.append((source, source + length))
    covered.sort()
    assert covered[0][0] == tensor.address
    assert covered[-1][1] == tensor.address + tensor.length
    assert all(end == start for (_, end), (start, _) in pairwise(covered))
    for chunk, parts in enumerate(found.parts):
        assert all(part.offset // CHUNK == chunk for part in parts)
        assert bool(found.in_chunk[chunk]) == bool(parts)
