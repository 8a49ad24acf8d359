"""A file set aside: no reader looks at it until it has its name.

It is locked (flock) by its writer, so that whoever finds it unlocked knows that its writer is dead, on whichever
machine it ran, and removes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

import xxhash

from deepvm.errors import Corrupt, StoreUnavailable
from deepvm.store.base import Manifest
from deepvm.store.regular_file import open_regular

WRITE_BYTES = 2**20  # larger pieces into new files were up to five times slower with fsync
HASHED_BYTES = 2**19  # read at once: fits into the cache of a core
MOST_PIECES = 512  # of one pwritev; Linux takes 1,024


class StagedFile:
    """A file that no reader looks at, locked for as long as its writer lives."""

    was: Manifest | None = None  # the checkpoint that it was, as far as nothing was written over it

    def __init__(self, directory: Path, name: str, *, private: bool = False) -> None:
        for _ in range(100):  # a cleaner may catch a file between its creation and its lock
            path = directory / f".{name}.tmp-{os.getpid()}-{secrets.token_hex(4)}"
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600 if private else 0o666)
            if lock_if_free(fd) and os.fstat(fd).st_nlink:
                self.fd, self.path = fd, path
                return
            os.close(fd)  # a cleaner has it: it is gone, or about to go
        raise StoreUnavailable(f"files in {directory} vanish as they are made: is something cleaning it?")

    @classmethod
    def recycled(cls, data: Path, was: Manifest | None) -> StagedFile | None:
        """Take a checkpoint's file out of the readers' sight, if no reader has it open or mapped, nor linked."""
        try:
            fd = open_regular(data, os.O_RDWR | os.O_NOFOLLOW)
        except (OSError, Corrupt):
            return None
        spare = cls.__new__(cls)
        spare.fd, spare.path = fd, data.with_name(f".{data.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
        spare.was = was
        try:
            if not lock_if_free(fd):
                raise OSError(errno.EWOULDBLOCK, "locked by another")
            os.rename(data, spare.path)  # now nobody can open it any more, and the lease tells whether somebody has
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            if os.fstat(fd).st_nlink == 1:
                return spare
        except OSError:  # in use, or a file system that cannot tell: an ordinary removal then
            pass
        spare.discard()
        return None

    def has(self, chunk: int, offset: int, length: int, digest: int) -> bool:
        """True if a chunk is here already: it was the same in the checkpoint that this file was, and its bytes are
        read and hashed, since a bit may have flipped in them since."""
        was = self.was
        return (
            was is not None
            and chunk < len(was.digests)
            and was.digests[chunk] == digest
            and was.span(chunk) == (offset, length)
            and self._digest(offset, length) == digest
        )

    def _digest(self, offset: int, length: int) -> int | None:
        """Of bytes in the file; None where it ends before them, or cannot be read."""
        hasher, buffer = xxhash.xxh3_64(), memoryview(bytearray(min(length, HASHED_BYTES)))
        done = 0
        while done < length:
            try:
                count = os.preadv(self.fd, [buffer[: length - done]], offset + done)
            except OSError:  # damaged so that the disk itself notices: then it is written again
                return None
            if count == 0:
                return None
            hasher.update(buffer[:count])
            done += count
        return hasher.intdigest()

    def resize(self, size_bytes: int) -> None:
        """Have all the room now, so that a full disk is known before the first byte."""
        if os.fstat(self.fd).st_size > size_bytes:
            os.ftruncate(self.fd, size_bytes)
        try:
            os.posix_fallocate(self.fd, 0, size_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            os.ftruncate(self.fd, size_bytes)

    def write(self, pieces: Sequence[memoryview], offset: int) -> None:
        end = offset
        for batch in _batches(pieces):
            end += _write(self.fd, batch, end)
        _start_writeback(self.fd, offset, end - offset)

    def rename(self, target: Path) -> None:
        os.rename(self.path, target)
        self.path = target

    def release(self) -> None:
        """The file is a reader's now."""
        fd, self.fd = self.fd, -1
        os.close(fd)

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self.path)
        with contextlib.suppress(OSError):
            self.release()


def remove_stale(directory: Path) -> None:
    """Remove the files set aside by writers that are dead: nobody holds their lock."""
    for entry in os.listdir(directory):
        if not (entry.startswith(".step-") and ".tmp-" in entry):
            continue
        with contextlib.suppress(OSError, Corrupt):  # gone meanwhile, another user's, or no file of a writer
            fd = open_regular(directory / entry, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(directory / entry)
            finally:
                os.close(fd)


def lock_if_free(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # a file system without locks: then nobody else can lock it either
        return error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN)
    return True


def _batches(pieces: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """The pieces again, cut and grouped into writes of at most WRITE_BYTES."""
    batch: list[memoryview] = []
    room = WRITE_BYTES
    for piece in pieces:
        rest = piece.cast("B") if piece.format != "B" or piece.ndim != 1 else piece
        while len(rest):
            part, rest = rest[:room], rest[room:]
            batch.append(part)
            room -= len(part)
            if not room or len(batch) == MOST_PIECES:
                yield batch
                batch, room = [], WRITE_BYTES
    if batch:
        yield batch


def _write(fd: int, pieces: list[memoryview], offset: int) -> int:
    total = sum(map(len, pieces))
    done = os.pwritev(fd, pieces, offset)
    if done < total:  # seldom: a signal, or the disk is nearly full
        rest = memoryview(b"".join(pieces))
        while done < total:
            done += os.pwrite(fd, rest[done:], offset + done)
    return total


_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux; elsewhere the fsync does it all
if _sync_file_range is not None:
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
_SYNC_FILE_RANGE_WRITE = 2


def _start_writeback(fd: int, offset: int, length: int) -> None:
    """Let the disk write while further chunks come: saves with fsync take about half the time. A hint: fsync judges."""
    if _sync_file_range is not None:
        _sync_file_range(fd, offset, length, _SYNC_FILE_RANGE_WRITE)
