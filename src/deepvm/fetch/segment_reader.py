"""A segment, finished or being filled -> the bytes of its checkpoint, for ``fetched_store``."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import time
from pathlib import Path

from deepvm.errors import Corrupt
from deepvm.fetch import segment, segment_files
from deepvm.fetch.segment import About, Head, State

CHOOSE_S = 5.0  # to wait for a fetcher that has not chosen a checkpoint yet
STALL_S = 5.0  # to wait for a fetcher that brings nothing
_PAUSE_S = 0.001


class SegmentReader:
    """A segment whose writer has chosen a checkpoint. Threads may share it."""

    def __init__(self, path: Path, fd: int) -> None:
        head = segment.read_head(fd)
        self.path, self._fd, self._head = path, fd, head
        self.about = About.from_bytes(os.pread(fd, head.about_bytes, segment.PAGE_BYTES))
        manifest = self.about.manifest
        ends = head.data_offset + head.size_bytes
        if len(manifest.digests) != head.chunks or manifest.size_bytes != head.size_bytes:
            raise Corrupt(f"{path} has {head.chunks} chunks, {head.size_bytes} bytes; its manifest says otherwise")
        if os.fstat(fd).st_size < ends:
            raise Corrupt(f"{path} is truncated: it has {os.fstat(fd).st_size} of {ends} bytes")
        self._front = mmap.mmap(fd, head.data_offset, prot=mmap.PROT_READ)
        self._flags = memoryview(self._front)[head.flags_offset : head.flags_offset + head.chunks]
        self._lock = threading.Lock()
        self._progress = 0, time.monotonic()
        self._given_up = False

    def read_head(self) -> Head:
        return segment.read_head(self._fd)

    @property
    def chunks_present(self) -> int:
        return bytes(self._flags).count(1)

    def has(self, chunk: int) -> bool:
        return self._flags[chunk] == 1

    def wait_for_chunk(self, chunk: int) -> bool:
        """Wait until a chunk has arrived (True), or will not (False)."""
        while not self.has(chunk):
            if self._given_up or segment.read_state(self._fd) == State.FAILED or not self._is_filling():
                self._given_up = True
                return self.has(chunk)
            time.sleep(_PAUSE_S)
        return True

    def _is_filling(self) -> bool:
        """True if the writer is alive and makes progress."""
        if not _is_locked(self._fd):
            return False
        with self._lock:
            present, now = self.chunks_present, time.monotonic()
            if present != self._progress[0]:
                self._progress = present, now
            return now - self._progress[1] < STALL_S

    def read(self, offset: int, into: memoryview) -> None:
        """Read bytes of the checkpoint, by a system call: other threads run meanwhile, and no page is mapped."""
        done, at = 0, self._head.data_offset + offset
        while done < len(into):
            count = os.preadv(self._fd, [into[done:]], at + done)
            if count <= 0:
                raise Corrupt(f"{self.path} is truncated at {at + done}")
            done += count

    # --- the end ------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Mark the segment as no longer needed by this rank. The last rank of this machine removes it."""
        rank, ranks = local_ranks()
        os.pwrite(self._fd, b"\1", segment.RANKS_OFFSET + rank)
        marks = os.pread(self._fd, ranks, segment.RANKS_OFFSET)
        if all(marks):
            segment_files.unlink_if_same(self.path, self._fd)

    def close(self) -> None:
        self._flags.release()
        self._front.close()
        os.close(self._fd)


def local_ranks() -> tuple[int, int]:
    """Return this process's rank on this machine and their number, as torchrun sets them."""
    try:
        rank, ranks = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    except ValueError:
        return 0, 1
    return (rank, ranks) if 0 <= rank < ranks <= segment.MOST_RANKS else (0, 1)


def find_segment(run: str) -> SegmentReader | None:
    """Find the segment of a run at the path in the environment, or at its default path. Returns None if no writer has
    chosen a checkpoint within CHOOSE_S. Raises StoreError if the segment must not be used."""
    named = os.environ.get(segment.PATH_VARIABLE)
    if named == "":
        return None
    path = segment_files.default_path(run) if named is None else Path(named)
    segment_files.remove_orphans(but=run)
    deadline = time.monotonic() + CHOOSE_S
    while True:
        try:
            fd = segment_files.open_private(path)
        except FileNotFoundError:
            return None
        try:
            if segment.read_state(fd) in (State.FILLING, State.WHOLE):  # the rest of the header is valid from then on
                found = SegmentReader(path, fd)
                if found.about.manifest.run != run:
                    raise Corrupt(f"{path} holds a checkpoint of run {found.about.manifest.run}, not of {run}")
                fd = -1
                return found
            if not _is_locked(fd):
                removed = segment_files.unlink_if_same(path, fd)  # its writer was killed before it chose, or gave up
                if not removed and os.fstat(fd).st_size:
                    segment.read_head(fd)  # raises if the file is something else
                return None
            if time.monotonic() > deadline:
                return None
        finally:
            if fd >= 0:
                os.close(fd)
        time.sleep(_PAUSE_S)


def _is_locked(fd: int) -> bool:
    """True if the writer is alive."""
    if not segment_files.lock_if_free(fd, fcntl.LOCK_SH):
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False
