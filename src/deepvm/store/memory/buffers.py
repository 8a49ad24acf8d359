"""The memory of a chunk in strips: what is handed to the kernel and hashed at once.

They are cut once, and not at each save: between two strips the interpreter's own memory is no longer in the cache, so
that every line which runs there is slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from deepvm.protocol.sockets import HASHED_BYTES

_VIEWS = 64  # of one strip at most; more than that costs more than it saves


class BufferGroup(NamedTuple):
    bytes: int
    views: Sequence[memoryview]


def group(views: Sequence[memoryview]) -> list[BufferGroup]:
    """Some memory in strips of at most HASHED_BYTES."""
    strips: list[BufferGroup] = []
    strip: list[memoryview] = []
    left = HASHED_BYTES
    for view in views:
        start = 0
        while start < len(view):
            part = view[start : start + left]
            strip.append(part)
            start += len(part)
            left -= len(part)
            if not left or len(strip) == _VIEWS:
                strips.append(BufferGroup(HASHED_BYTES - left, strip))
                strip, left = [], HASHED_BYTES
    return [*strips, BufferGroup(HASHED_BYTES - left, strip)] if strip else strips


def from_offset(strips: Sequence[BufferGroup], offset: int) -> Sequence[BufferGroup]:
    """What is left after the first bytes."""
    for i, strip in enumerate(strips):
        if offset < strip.bytes:
            rest = BufferGroup(strip.bytes - offset, _without(strip.views, offset)) if offset else strip
            return [rest, *strips[i + 1 :]] if i or offset else strips
        offset -= strip.bytes
    return []


def _without(views: Sequence[memoryview], offset: int) -> Sequence[memoryview]:
    for i, view in enumerate(views):
        if offset < len(view):
            return [view[offset:], *views[i + 1 :]]
        offset -= len(view)
    return []


def first_bytes(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """The first so many bytes of some memory."""
    found: list[memoryview] = []
    for view in views:
        if count <= 0:
            break
        found.append(view[:count])
        count -= len(view)
    return found


def views_of(strips: Sequence[BufferGroup]) -> list[memoryview]:
    return [view for strip in strips for view in strip.views]
