"""Group the memory of a chunk into what is handed to the kernel and hashed at once; connection.py sends the groups.

Groups are made once and not at each save: between two of them the interpreter's own memory has left the cache, and
every line that runs there is slow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from deepvm.protocol.sockets import HASHED_BYTES

_VIEWS = 64  # of a group at most: more cost more than they save


class BufferGroup(NamedTuple):
    bytes: int
    views: Sequence[memoryview]


def group(views: Sequence[memoryview]) -> list[BufferGroup]:
    """Group views into groups of at most HASHED_BYTES."""
    groups: list[BufferGroup] = []
    one: list[memoryview] = []
    left = HASHED_BYTES
    for view in views:
        start = 0
        while start < len(view):
            part = view[start : start + left]
            one.append(part)
            start += len(part)
            left -= len(part)
            if not left or len(one) == _VIEWS:
                groups.append(BufferGroup(HASHED_BYTES - left, one))
                one, left = [], HASHED_BYTES
    return [*groups, BufferGroup(HASHED_BYTES - left, one)] if one else groups


def from_offset(groups: Sequence[BufferGroup], offset: int) -> Sequence[BufferGroup]:
    """Return the groups from an offset on."""
    for i, one in enumerate(groups):
        if offset < one.bytes:
            rest = BufferGroup(one.bytes - offset, _without(one.views, offset)) if offset else one
            return [rest, *groups[i + 1 :]] if i or offset else groups
        offset -= one.bytes
    return []


def _without(views: Sequence[memoryview], offset: int) -> Sequence[memoryview]:
    for i, view in enumerate(views):
        if offset < len(view):
            return [view[offset:], *views[i + 1 :]]
        offset -= len(view)
    return []


def first_bytes(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """Return the first ``count`` bytes."""
    found: list[memoryview] = []
    for view in views:
        if count <= 0:
            break
        found.append(view[:count])
        count -= len(view)
    return found


def views_of(groups: Iterable[BufferGroup]) -> Iterator[memoryview]:
    """Yield all views; a view may be valid only until the next one is asked for."""
    return (view for one in groups for view in one.views)
