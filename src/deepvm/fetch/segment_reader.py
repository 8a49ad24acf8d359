"""The reading side of a segment: what is there, what will be, and whether somebody is still filling it."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from deepvm.errors import Corrupt
from deepvm.fetch import segment
from deepvm.fetch.segment import About, Head, State

CHOOSE_S = 5.0  # so long a trainer waits for a fetcher that has not chosen yet
STALL_S = 5.0  # a fetcher that brings nothing for so long is waited for no longer
_PAUSE_S = 0.001


@dataclass(frozen=True, kw_only=True)
class Times:
    """When the filler was started, chose, and was done (None: it is not), in seconds since boot."""

    started_s: float
    chosen_s: float
    whole_s: float | None


class Segment:
    """A segment that a filler has begun. Threads may share it."""

    def __init__(self, path: Path, fd: int, head: Head) -> None:
        self.path, self._fd, self._head = path, fd, head
        self.about = About.from_bytes(os.pread(fd, head.about_bytes, segment.PAGE_BYTES))
        manifest = self.about.manifest
        ends = head.data_offset + head.size_bytes
        if len(manifest.digests) != head.chunks or manifest.size_bytes != head.size_bytes:
            raise Corrupt(f"{path} has {head.chunks} chunks, {head.size_bytes} bytes; its manifest says otherwise")
        if os.fstat(fd).st_size < ends:
            raise Corrupt(f"{path} is cut off: {os.fstat(fd).st_size} bytes of {ends}")
        self.taken = os.pread(fd, 1, segment.TAKEN_OFFSET) != b"\0"  # by a trainer before, which may have written to it
        self._front = mmap.mmap(fd, head.data_offset, prot=mmap.PROT_READ)
        self._flags = memoryview(self._front)[head.flags_offset : head.flags_offset + head.chunks]
        self._lock = threading.Lock()
        self._progress = 0, time.monotonic()
        self._given_up = False
        self._mapped: mmap.mmap | None = None
        self._address = 0

    @property
    def times(self) -> Times:
        head = Head.from_bytes(os.pread(self._fd, segment.HEAD_BYTES, 0))
        return Times(started_s=head.started_s, chosen_s=head.chosen_s, whole_s=head.whole_s or None)

    @property
    def chunks_there(self) -> int:
        return bytes(self._flags).count(1)

    def has(self, chunk: int) -> bool:
        return self._flags[chunk] == 1

    def await_chunk(self, chunk: int) -> bool:
        """Whether it is there, once that is sure: it came, or nobody will bring it."""
        while not self.has(chunk):
            if self._given_up or _state(self._fd) == State.FAILED or not self._comes():
                self._given_up = True
                return self.has(chunk)
            time.sleep(_PAUSE_S)
        return True

    def _comes(self) -> bool:
        """Whether a filler is alive and brings something."""
        if not _is_locked(self._fd):
            return False
        with self._lock:
            there, now = self.chunks_there, time.monotonic()
            if there != self._progress[0]:
                self._progress = there, now
            return now - self._progress[1] < STALL_S

    def read(self, offset: int, into: memoryview) -> None:
        """Bytes of the checkpoint. By a system call: it lets other threads run, and no page has to be mapped."""
        done, at = 0, self._head.data_offset + offset
        while done < len(into):
            count = os.preadv(self._fd, [into[done:]], at + done)
            if count <= 0:
                raise Corrupt(f"{self.path} is cut off at {at + done}")
            done += count

    # --- in place -----------------------------------------------------------------------------------------------

    def mapped(self) -> memoryview:
        """All bytes of the checkpoint, to be used in place: a chunk is valid once it is there. Changes of the only rank
        of a machine are made in the segment itself, without a copy; one of several ranks changes copies of its own."""
        with self._lock:
            if self._mapped is None:
                if self.alone:
                    os.pwrite(self._fd, b"\1", segment.TAKEN_OFFSET)
                self._mapped = mmap.mmap(
                    self._fd,
                    self._head.size_bytes,
                    flags=mmap.MAP_SHARED if self.alone else mmap.MAP_PRIVATE,
                    prot=mmap.PROT_READ | mmap.PROT_WRITE,
                    offset=self._head.data_offset,
                )
                self._address = _address_of(memoryview(self._mapped))
        return memoryview(self._mapped)

    @property
    def alone(self) -> bool:
        return local_ranks()[1] == 1

    def is_in_place(self, offset: int, into: memoryview) -> bool:
        """Whether a buffer is the mapping's own memory at this offset."""
        return self._mapped is not None and not into.readonly and _address_of(into) == self._address + offset

    # --- the end ------------------------------------------------------------------------------------------------

    def done(self) -> bool:
        """Tell that this rank needs it no more. The last rank of this machine removes it; whether it did."""
        rank, ranks = local_ranks()
        os.pwrite(self._fd, b"\1", segment.RANKS_OFFSET + rank)
        marks = os.pread(self._fd, ranks, segment.RANKS_OFFSET)
        return all(marks) and segment.unlink_if_same(self.path, self._fd)

    def close(self) -> None:
        """Views that are out stay valid."""
        self._flags.release()
        self._front.close()
        os.close(self._fd)


def local_ranks() -> tuple[int, int]:
    """This process among those of its job on this machine, and how many they are, as torchrun tells it."""
    try:
        rank, ranks = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    except ValueError:
        return 0, 1
    return (rank, ranks) if 0 <= rank < ranks <= segment.MOST_RANKS else (0, 1)


def find_segment(run: str, *, wait_s: float = CHOOSE_S) -> Segment | None:
    """The segment of a run: where the environment says, or at its usual place. None where there is none that is, or
    soon will be, of use; raises StoreError where there is one that must not be used."""
    named = os.environ.get(segment.PATH_VARIABLE)
    if named == "":
        return None
    path = segment.default_path(run) if named is None else Path(named)
    segment.remove_orphans(but=run)
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fd = segment.open_private(path)
        except FileNotFoundError:
            return None
        try:
            if _state(fd) in (State.FILLING, State.WHOLE):  # what the rest of the header says is sure from then on
                found = Segment(path, fd, Head.from_bytes(os.pread(fd, segment.HEAD_BYTES, 0)))
                if found.about.manifest.run != run:
                    raise Corrupt(f"{path} holds a checkpoint of run {found.about.manifest.run}, not of {run}")
                fd = -1
                return found
            if not _is_locked(fd):
                segment.unlink_if_same(path, fd)  # its filler was killed before it chose, or gave up
                return None
            if time.monotonic() > deadline:
                return None
        finally:
            if fd >= 0:
                os.close(fd)
        time.sleep(_PAUSE_S)


def _state(fd: int) -> int:
    return int.from_bytes(os.pread(fd, 4, segment.STATE_OFFSET), "little")


def _is_locked(fd: int) -> bool:
    """Whether its filler lives."""
    if not segment.lock_if_free(fd, fcntl.LOCK_SH):
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


def _address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
