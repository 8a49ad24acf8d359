"""A run's name -> the file of its segment: where it is, who may have written it, and when it is removed.

Any user may write to /dev/shm, so a name in it proves nothing. The folder of this user is opened without following a
link and checked (``open_folder``); files in it are opened and removed through that descriptor. Nothing but segments is
removed.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from deepvm.errors import AccessDenied, StoreError
from deepvm.fetch.segment import MAGIC
from deepvm.store.base import check_run

log = logging.getLogger("deepvm.fetch")

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - open_folder checks the folder in it
ORPHAN_S = 5.0  # a trainer may be about to open the segment of a fetcher that was killed just now


def shared_folder() -> Path:
    """Return this user's folder in shared memory. Another user may have made something of that name."""
    return SHARED_MEMORY / f"deepvm-{os.getuid()}"


def default_path(run: str) -> Path:
    """Return where the trainer looks for a segment: a path with the names of user and run."""
    return shared_folder() / check_run(run)


def make_folder(folder: Path) -> None:
    """Make the user's own folder in shared memory. Raises AccessDenied if another user could write to it."""
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise StoreError(f"{folder} cannot be made ({error.strerror}): pass another path with --into") from None
    with suppress(FileNotFoundError), open_folder(folder):  # it was removed with the last segment in it
        pass


@contextmanager
def open_folder(folder: Path) -> Iterator[int]:
    """Open a segment's folder. The user's own in shared memory must be a directory of this user alone; any other one is
    the user's choice. Raises FileNotFoundError if it does not exist."""
    shared = folder == shared_folder()
    flags = os.O_RDONLY | os.O_NOFOLLOW if shared else os.O_PATH
    try:
        fd = os.open(folder, flags | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENOENT or (error.errno == errno.ENOTDIR and not shared):
            raise FileNotFoundError(folder) from None
        if shared:
            _check_private(folder, os.lstat(folder), False)
        raise AccessDenied(f"{folder} cannot be opened: {error.strerror}") from None
    try:
        if shared:
            _check_private(folder, os.fstat(fd), True)
        yield fd
    finally:
        os.close(fd)


def _check_private(path: Path, found: os.stat_result, right_kind: bool) -> None:
    if not right_kind or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise AccessDenied(
            f"{path} is not this user's alone (owner {found.st_uid}, {stat.filemode(found.st_mode)}): "
            "remove it, or pass another path with --into"
        )


def open_private(path: Path) -> int:
    """Open a segment that only this user could have written. Raises FileNotFoundError if there is none."""
    with open_folder(path.parent) as folder:
        try:
            fd = os.open(path.name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=folder)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise AccessDenied(f"{path} cannot be opened: {error.strerror}") from None
    try:
        found = os.fstat(fd)
        _check_private(path, found, stat.S_ISREG(found.st_mode))
    except AccessDenied:
        os.close(fd)
        raise
    return fd


def create(path: Path) -> int:
    """Create the file of a segment. Raises FileExistsError or FileNotFoundError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    with open_folder(path.parent) as folder:
        return os.open(path.name, flags, 0o600, dir_fd=folder)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    fd = open_private(path)
    try:
        yield fd
    finally:
        os.close(fd)


def lock_if_free(fd: int, how: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_segment(path: Path, fd: int) -> bool:
    """True if a file begins like a segment. In the user's own folder an empty one does, too: its fetcher was killed
    before it wrote the first bytes."""
    start = os.pread(fd, len(MAGIC), 0)
    return start == MAGIC or (not start and path.parent == shared_folder())


def remove(path: Path) -> None:
    """Remove what a killed writer left, if anything."""
    with suppress(OSError, StoreError), opened(path) as fd:
        unlink_if_same(path, fd)


def remove_orphans(*, but: str) -> None:
    """Remove the segments of other runs than ``but`` whose writer was killed. A trainer that reads one keeps it open;
    one that starts later than ORPHAN_S restores from its stores."""
    folder = shared_folder()
    try:
        with open_folder(folder) as fd:
            names = [name for name in os.listdir(fd) if name != but]
    except (OSError, StoreError):  # it does not exist, or is not this user's alone
        return
    for name in names:
        with suppress(OSError, StoreError), opened(folder / name) as fd:  # or it is gone, or not this user's alone
            old = time.time() - os.fstat(fd).st_mtime >= ORPHAN_S
            if old and lock_if_free(fd) and unlink_if_same(folder / name, fd):
                log.info("removed %s of a fetcher that was killed", folder / name)


def unlink_if_same(path: Path, fd: int) -> bool:
    """Remove a segment if it is still the open one; then the user's folder, if it is empty."""
    if not is_segment(path, fd):
        return False
    try:
        with open_folder(path.parent) as folder:
            found = os.stat(path.name, dir_fd=folder, follow_symlinks=False)
            if not os.path.samestat(found, os.fstat(fd)):
                return False
            os.unlink(path.name, dir_fd=folder)
    except FileNotFoundError:
        return False
    if path.parent == shared_folder():
        with suppress(OSError):  # another run has a segment there
            os.rmdir(path.parent)
    return True
