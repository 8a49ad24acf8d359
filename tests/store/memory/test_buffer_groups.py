"""Groups of buffers: every byte once, in order, and no empty view."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deepvm.protocol.sockets import HASHED_BYTES
from deepvm.store.memory.buffers import first_bytes, from_offset, group, views_of

pieces = st.lists(st.binary(min_size=1, max_size=9), max_size=200)


def joined(views: list[memoryview]) -> bytes:
    return b"".join(views)


@given(pieces, st.integers(0, 2000))
def test_first_bytes_are_a_prefix_without_empty_views(parts: list[bytes], count: int) -> None:
    found = first_bytes([memoryview(part) for part in parts], count)

    assert joined(found) == b"".join(parts)[:count]
    assert all(found)


@given(pieces, st.integers(0, 2000))
def test_groups_from_an_offset_are_the_rest(parts: list[bytes], offset: int) -> None:
    groups = group([memoryview(part) for part in parts])
    rest = from_offset(groups, offset)

    assert joined(views_of(rest)) == b"".join(parts)[offset:]
    assert all(one.bytes == sum(map(len, one.views)) > 0 for one in rest)
    assert all(views_of(rest))


def test_a_group_holds_at_most_what_is_hashed_at_once_and_64_views() -> None:
    large = memoryview(bytes(2 * HASHED_BYTES + 1))

    assert [one.bytes for one in group([large])] == [HASHED_BYTES, HASHED_BYTES, 1]
    assert [one.bytes for one in group([large[:HASHED_BYTES]])] == [HASHED_BYTES]
    assert [len(one.views) for one in group([large[:1]] * 129)] == [64, 64, 1]
    assert group([]) == []
