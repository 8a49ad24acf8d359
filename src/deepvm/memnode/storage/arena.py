"""The node's memory: blocks of one size with counted references. Uploads take blocks, checkpoints hold them.

Fresh pages cost several times as much as warm ones. So a block that was used is used again first, and new ones are
prefaulted in the background, in extents, before they are needed. Unneeded ones are never touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
import time
from collections.abc import Iterable, Iterator

from deepvm.errors import UsageError
from deepvm.units import format_bytes

HUGE_PAGE_BYTES = 2 * 2**20
EXTENT_BYTES = 64 * 2**20
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_MAP_NORESERVE = 0x4000  # address space is taken now, memory when it is touched

Content = tuple[int, int]  # xxh3-64 and length of what is in a block


class ArenaFull(Exception):
    def __init__(self, needed: int, free: int) -> None:
        self.needed, self.free = needed, free
        super().__init__(f"{needed} blocks needed, {free} free")


class Arena:
    """Blocks are numbers. A block that is not free has at least one reference; used + reserved <= blocks, always."""

    def __init__(self, capacity_bytes: int, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.blocks = capacity_bytes // block_bytes
        size = self.blocks * block_bytes
        try:
            self._map = mmap.mmap(
                -1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            )
        except (OSError, ValueError, OverflowError) as error:
            raise UsageError(f"{format_bytes(size)} of memory cannot be mapped: {error}") from None
        with contextlib.suppress(OSError, AttributeError):  # kernels without huge pages use small ones
            self._map.madvise(mmap.MADV_HUGEPAGE)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        start = -base % HUGE_PAGE_BYTES
        self._address = base + start
        self._memory = memoryview(self._map)[start : start + size]
        self._libc = ctypes.CDLL(None, use_errno=True)  # unlike mmap.madvise, its calls let other threads run
        self._libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

        self._changed = threading.Condition()
        self._counts: list[int] = [0] * self.blocks
        self._contents: dict[int, Content] = {}  # of blocks that do not change any more
        self._by_content: dict[Content, list[int]] = {}  # more than one only if two were saved at the same time
        self._warm: list[int] = []  # free and used before; the last is the warmest
        self._fresh = 0  # blocks from here on were never used
        self._touched = 0  # blocks below this have their pages
        self._goal = 0  # the background touches up to here
        self._reserved = 0
        self._closed = False
        self._toucher = threading.Thread(target=self._touch_ahead, name="deepvm-arena", daemon=True)

    def start(self) -> None:
        """Start to prefault. Without it, each block's pages are touched when the block is taken."""
        self._toucher.start()

    # --- figures --------------------------------------------------------------------------------------------------

    @property
    def capacity_bytes(self) -> int:
        return self.blocks * self.block_bytes

    @property
    def used(self) -> int:
        return self._fresh - len(self._warm)

    @property
    def reserved(self) -> int:
        return self._reserved

    @property
    def free(self) -> int:
        """Blocks that a new reservation may take."""
        return self.blocks - self.used - self._reserved

    @property
    def touched(self) -> int:
        return max(self._touched, self._fresh)

    # --- reservations ---------------------------------------------------------------------------------------------

    def reserve(self, count: int, *, timeout_s: float = 0.0) -> None:
        """Reserve blocks, so that taking them cannot fail later; wait for room until the time is up."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while count > self.free:
                left = deadline - time.monotonic()
                if left <= 0 or count > self.blocks:
                    raise ArenaFull(count, self.free)
                self._changed.wait(left)
            self._reserved += count
            self._aim(self._fresh + max(0, self._reserved - len(self._warm)))

    def await_free(self, timeout_s: float) -> None:
        """Wait until some block is free, or the time is up."""
        with self._changed:
            self._changed.wait_for(lambda: self.free > 0, max(0.0, timeout_s))

    def unreserve(self, count: int) -> None:
        with self._changed:
            self._reserved -= count
            self._changed.notify_all()

    def prefault(self, blocks: int) -> None:
        """Touch the pages of the first ``blocks`` blocks in the background, before they are needed."""
        with self._changed:
            self._aim(blocks)

    def _aim(self, goal: int) -> None:
        goal = min(goal, self.blocks)
        if goal > self._goal:
            self._goal = goal
            self._changed.notify_all()

    # --- blocks ---------------------------------------------------------------------------------------------------

    def take(self, *, reserved: bool) -> int:
        """Take a block with one reference, from a reservation or from the free ones."""
        with self._changed:
            if reserved:
                self._reserved -= 1
            elif self.free < 1:
                raise ArenaFull(1, 0)
            if self._warm:
                block = self._warm.pop()
            else:
                block = self._fresh
                self._fresh += 1
            self._counts[block] = 1
            cold = block >= self._touched
        if cold:
            self._touch(block, 1)
        return block

    def hold(self, block: int) -> None:
        with self._changed:
            self._counts[block] += 1

    def drop(self, block: int, *, reserve: bool = False) -> bool:
        """Drop a reference. With ``reserve``, a block that becomes free is reserved again; return True if so."""
        with self._changed:
            self._counts[block] -= 1
            if self._counts[block]:
                return False
            self._forget(block)
            self._warm.append(block)
            if reserve:
                self._reserved += 1
            else:
                self._changed.notify_all()
            return reserve

    def view(self, block: int, length: int) -> memoryview:
        if length > self.block_bytes:
            raise ValueError(f"{length} bytes of a block of {self.block_bytes}")
        start = block * self.block_bytes
        return self._memory[start : start + length]

    @contextlib.contextmanager
    def consume(self, block: int, length: int) -> Iterator[memoryview]:
        """Yield a block's bytes, then drop the caller's reference to it."""
        try:
            with self.view(block, length) as view:
                yield view
        finally:
            self.drop(block)

    # --- by content -------------------------------------------------------------------------------------------------

    def index(self, named: Iterable[tuple[int, Content]]) -> None:
        """Index blocks that do not change any more by their content, until they are free."""
        with self._changed:
            for block, content in named:
                if self._counts[block] and block not in self._contents:
                    self._contents[block] = content
                    self._by_content.setdefault(content, []).append(block)

    def contains(self, contents: Iterable[Content]) -> list[bool]:
        with self._changed:
            return [content in self._by_content for content in contents]

    def hold_content(self, content: Content) -> int | None:
        """Return a block with that digest and length, with one more reference to it."""
        with self._changed:
            blocks = self._by_content.get(content)
            if blocks is None:
                return None
            self._counts[blocks[-1]] += 1  # the newest: an older one may have been damaged since
            return blocks[-1]

    def _forget(self, block: int) -> None:
        content = self._contents.pop(block, None)
        if content is not None:
            blocks = self._by_content[content]
            blocks.remove(block)
            if not blocks:
                del self._by_content[content]

    # --- touching -------------------------------------------------------------------------------------------------

    def _touch(self, block: int, count: int) -> None:
        start, length = self._address + block * self.block_bytes, count * self.block_bytes
        # A kernel before 5.14 refuses: then each page is touched at first use, which is only slower.
        self._libc.madvise(start, length, _MADV_POPULATE_WRITE)

    def _touch_ahead(self) -> None:
        extent = max(1, EXTENT_BYTES // self.block_bytes)
        while True:
            with self._changed:
                while not self._closed and self._touched >= self._goal:
                    self._changed.wait(60)
                if self._closed:
                    return
                start = max(self._touched, self._fresh)
                count = min(extent, self._goal - start)
            if count > 0:
                self._touch(start, count)
            with self._changed:
                self._touched = max(self._touched, start + count)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._toucher.is_alive():
            self._toucher.join(10)
        with contextlib.suppress(BufferError):  # a view is still out: the last one to go frees the memory
            self._memory.release()
            self._map.close()
