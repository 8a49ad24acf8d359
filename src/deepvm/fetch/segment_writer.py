"""A manifest and verified chunks, from ``pull`` -> a segment.

Bytes are written with pwrite: 0.37 s of processor time per GiB. Copying into a fresh mapping takes 0.8 s, or 0.64 s
with MADV_POPULATE_WRITE, and a full file system is then a signal instead of an error.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from deepvm.errors import StoreUnavailable
from deepvm.fetch import clock, segment, segment_files
from deepvm.fetch.segment import About, Head, State
from deepvm.store.base import Manifest
from deepvm.units import format_bytes

TRIES = 100
BUSY_S = 0.3  # readers hold the lock for an instant, to see whether the writer lives
SPARE = 1.02  # of the checkpoint's size: leave the machine some memory


class SegmentWriter:
    """A segment that this process fills. It has its name from the start, so that an early trainer waits for it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._shared = path == segment_files.default_path(path.name)
        if self._shared:
            segment_files.make_folder(path.parent)
        self.remove_orphans()
        self._fd = self._create()
        self._writing = threading.Lock()
        self._head = Head(
            state=State.CHOOSING,
            pid=os.getpid(),
            pid_started_ticks=clock.started_ticks(),
            started_s=clock.process_started_s(),
        )
        os.pwrite(self._fd, self._head.to_bytes(), 0)
        os.ftruncate(self._fd, segment.PAGE_BYTES)

    def remove_orphans(self) -> None:
        """Remove what killed fetchers of other runs left: no other process does."""
        if self._shared:
            segment_files.remove_orphans(but=self.path.name)

    def _create(self) -> int:
        for _ in range(TRIES):
            try:
                fd = segment_files.create(self.path)
            except FileExistsError:
                self._remove_dead()
                continue
            except FileNotFoundError:  # the folder was removed with the last segment in it
                if not self._shared:
                    raise StoreUnavailable(f"{self.path.parent} does not exist: make it first") from None
                segment_files.make_folder(self.path.parent)
                continue
            except OSError as error:
                raise StoreUnavailable(f"{self.path} cannot be made: {error.strerror}") from None
            if segment_files.lock_if_free(fd) and os.fstat(fd).st_nlink:
                return fd
            os.close(fd)  # another fetcher removed it as orphaned, between its creation and its lock
        raise StoreUnavailable(f"{self.path} was removed {TRIES} times: stop other fetchers of this run")

    def _remove_dead(self) -> None:
        """Remove what a dead fetcher left. Raises if it is alive."""
        with suppress(FileNotFoundError), segment_files.opened(self.path) as fd:
            deadline = time.monotonic() + BUSY_S
            while not segment_files.lock_if_free(fd):
                if time.monotonic() > deadline:
                    raise StoreUnavailable(
                        f"{self.path} is being filled or kept by another fetcher: stop that one, or use --into"
                    )
                time.sleep(0.01)
            if not segment_files.is_segment(self.path, fd):
                raise StoreUnavailable(f"{self.path} exists and is not a segment: remove it, or use --into")
            segment_files.unlink_if_same(self.path, fd)

    # --- filling ------------------------------------------------------------------------------------------------

    def choose(self, manifest: Manifest, store: str, passed_over: tuple[str, ...]) -> None:
        """Announce the checkpoint. Raises SegmentFull if there is too little room for it."""
        self._check_room(manifest.size_bytes)
        about = About(store=store, passed_over=passed_over, manifest=manifest).to_bytes()
        chunks = len(manifest.digests)
        offset = segment.data_offset(len(about), chunks)
        self._head = dataclasses.replace(
            self._head,
            about_bytes=len(about),
            chunks=chunks,
            data_offset=offset,
            size_bytes=manifest.size_bytes,
            chosen_s=clock.now_s(),
        )
        with _explained(self.path, manifest.size_bytes):
            os.ftruncate(self._fd, offset + manifest.size_bytes)
            os.pwrite(self._fd, about, segment.PAGE_BYTES)
            os.pwrite(self._fd, self._head.to_bytes(), 0)
        self._set_state(State.FILLING)

    def put(self, chunk: int, offset: int, data: memoryview) -> None:
        """Write a verified chunk to its offset in the checkpoint."""
        at, done = self._head.data_offset + offset, 0
        # One thread at a time: the kernel also serializes writes to a file, but spins
        with self._writing, _explained(self.path, self._head.size_bytes):
            while done < len(data):
                done += os.pwrite(self._fd, data[done:], at + done)
            os.pwrite(self._fd, b"\1", self._head.flags_offset + chunk)

    def finish(self) -> None:
        self._head = dataclasses.replace(self._head, whole_s=clock.now_s())
        os.pwrite(self._fd, self._head.to_bytes(), 0)
        self._set_state(State.WHOLE)

    def _set_state(self, state: State) -> None:
        self._head = dataclasses.replace(self._head, state=state)
        segment.write_state(self._fd, state)

    def _check_room(self, size_bytes: int) -> None:
        found = os.statvfs(self.path.parent)
        free = found.f_bavail * found.f_frsize
        if segment_files.SHARED_MEMORY in self.path.parents:  # its limit may exceed the free memory
            available = _available_memory_bytes()
            free = free if available is None else min(free, available - size_bytes)  # a trainer copies what it restores
        if free < size_bytes * SPARE:
            raise SegmentFull(
                f"{self.path.parent} has no room for the checkpoint: {format_bytes(size_bytes)} needed, "
                f"{format_bytes(max(0, free))} free beside a trainer's copy: enlarge it (mount -o remount,size=...), "
                "or use --into; the trainer restores from its stores as usual"
            )

    # --- the end ------------------------------------------------------------------------------------------------

    def is_wanted(self) -> bool:
        """True if its readers have not removed it."""
        return os.fstat(self._fd).st_nlink > 0

    def give_up(self) -> None:
        """Remove it. Readers that wait for more chunks turn to the stores."""
        if self._fd < 0:
            return
        if self._head.state is not State.WHOLE:
            self._set_state(State.FAILED)
        fd, self._fd = self._fd, -1
        segment_files.unlink_if_same(self.path, fd)
        os.close(fd)


class SegmentFull(StoreUnavailable):
    pass


def _available_memory_bytes() -> int | None:
    with suppress(OSError, ValueError, IndexError), open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


@contextmanager
def _explained(path: Path, size_bytes: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM):
            raise StoreUnavailable(f"{path} cannot be written: {error.strerror}") from None
        raise SegmentFull(
            f"{path.parent} became full ({error.strerror}) while {format_bytes(size_bytes)} were fetched into it: "
            "the trainer restores from its stores as usual"
        ) from None
