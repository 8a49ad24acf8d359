"""A staged file: bytes in, a file out that no reader looks at until it has its name. store.py writes checkpoints so.

Its writer locks it (flock). An unlocked one has a dead writer, on whichever machine it ran, and is removed.
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
from deepvm.store.chunks import as_bytes
from deepvm.store.regular_file import open_regular

WRITE_BYTES = 2**20  # larger pieces into new files were up to five times slower with fsync
HASHED_BYTES = 2**19  # read at once: fits into the cache of a core
MOST_PIECES = 512  # of one pwritev; Linux takes 1,024
_TRIES = 100


class StagedFile:
    """Locked for as long as its writer lives. As a context, it is discarded if its block raises, else released."""

    before: Manifest | None = None  # the checkpoint that it was, as far as nothing was written over it

    def __init__(self, directory: Path, name: str, *, private: bool = False) -> None:
        for _ in range(_TRIES):  # a cleaner may catch a file between its creation and its lock
            path = directory / _staged_name(name)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600 if private else 0o666)
            if lock_if_free(fd) and os.fstat(fd).st_nlink:
                self.fd, self.path = fd, path
                return
            os.close(fd)  # a cleaner has it: it is gone, or about to go
        raise StoreUnavailable(f"files in {directory} vanish as they are made: is something cleaning it?")

    def __enter__(self) -> StagedFile:
        return self

    def __exit__(self, problem: object, *_: object) -> None:
        if problem is None:
            self.release()
        else:
            self.discard()

    @classmethod
    def recycled(cls, data: Path, before: Manifest | None) -> StagedFile | None:
        """Stage a checkpoint's file again, if no reader has it open, mapped or linked."""
        try:
            fd = open_regular(data, os.O_RDWR | os.O_NOFOLLOW)
        except (OSError, Corrupt):
            return None
        spare = cls.__new__(cls)
        spare.fd, spare.path, spare.before = fd, data.with_name(_staged_name(data.name)), before
        try:
            if not lock_if_free(fd):
                raise OSError(errno.EWOULDBLOCK, "locked by another")
            os.rename(data, spare.path)  # no reader can open it any more, and the lease fails if one has it open
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            if os.fstat(fd).st_nlink == 1:
                return spare
        except OSError:  # in use, or a file system that cannot tell: an ordinary removal then
            pass
        spare.discard()
        return None

    def has(self, chunk: int, offset: int, length: int, digest: int) -> bool:
        """True if the checkpoint before had the same chunk; its bytes are hashed, since a bit may have flipped."""
        before = self.before
        return (
            before is not None
            and chunk < len(before.digests)
            and before.digests[chunk] == digest
            and before.span(chunk) == (offset, length)
            and self._digest(offset, length) == digest
        )

    def _digest(self, offset: int, length: int) -> int | None:
        """Hash bytes of the file; return None if it ends before them, or cannot be read."""
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
        """Allocate all space now, so that a full disk is noticed before the first byte."""
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
        """Close the file, and keep it."""
        fd, self.fd = self.fd, -1
        os.close(fd)

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self.path)
        with contextlib.suppress(OSError):
            self.release()


def remove_stale(directory: Path, stem: str = "step-") -> None:
    """Remove the staged files of dead writers, of one step or of all: their lock is free."""
    for entry in os.listdir(directory):
        if not (entry.startswith(f".{stem}") and ".tmp-" in entry):
            continue
        with contextlib.suppress(OSError, Corrupt):  # gone meanwhile, another user's, or not a writer's
            fd = open_regular(directory / entry, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(directory / entry)
            finally:
                os.close(fd)


def _staged_name(name: str) -> str:
    return f".{name}.tmp-{os.getpid()}-{secrets.token_hex(4)}"


def lock_if_free(fd: int) -> bool:
    """Lock a file without waiting; return False if another process holds it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # a file system without locks: then no other process can lock it either
        return error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN)
    return True


def _batches(pieces: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Cut and group pieces into writes of at most WRITE_BYTES."""
    batch: list[memoryview] = []
    room = WRITE_BYTES
    for piece in pieces:
        rest = as_bytes(piece)
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
    """Let the disk write while further chunks arrive: saves with fsync take about half the time."""
    if _sync_file_range is not None:
        _sync_file_range(fd, offset, length, _SYNC_FILE_RANGE_WRITE)
