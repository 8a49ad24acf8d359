"""One checkpoint in shared memory: a file that several processes can read while it is being filled.

    0       magic "DVMSEG1" + 0 · version u32 · state u32 · the filler's pid u64 and its start u64 (ticks since boot) ·
            length of about u64 · chunks u64 · where the data begin u64 · size of the data u64 ·
            when the filler was started, chose, and was done: 3 × f64, seconds since boot
    2047    1 once a trainer may write to the bytes of the checkpoint
    2048    a byte for each rank of this machine: 1 once it needs the segment no more
    4096    about: a JSON document: the store it comes from, what was passed over, and the manifest as text
    then    a byte for each chunk: 1 once it is there and verified
    then, at a multiple of 2 MiB, the bytes of the checkpoint

All numbers are little-endian. Whoever fills a segment holds an exclusive flock on it, for as long as it lives: so the
death of a filler is seen at once. Everything else is written before the state that speaks of it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import stat
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from deepvm import strict_json as strict
from deepvm.errors import AccessDenied, Corrupt, StoreError
from deepvm.store.base import Manifest, check_run

log = logging.getLogger("deepvm.fetch")

MAGIC, VERSION = b"DVMSEG1\0", 1
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - memory; the folder in it is the user's own, and checked
PATH_VARIABLE = "DEEPVM_FETCHED"
PAGE_BYTES = 4096
ALIGN_BYTES = 2 * 2**20  # a huge page, where shared memory has them; what lies before is a hole in the file
TAKEN_OFFSET, RANKS_OFFSET = 2047, 2048
MOST_RANKS = PAGE_BYTES - RANKS_OFFSET
STATE_OFFSET = 12
ORPHAN_S = 5.0  # a trainer may be about to open what its fetcher, killed just now, has left
MOST_ABOUT_BYTES = 256 * 2**20
_HEAD = struct.Struct("<8sII6Q3d")
_STATE = struct.Struct("<I")


class State(IntEnum):
    CHOOSING = 1  # nothing is known yet but that somebody is at work
    FILLING = 2
    WHOLE = 3
    FAILED = 4  # given up; what is there is not to be used


@dataclass(frozen=True, kw_only=True)
class Head:
    """What the first bytes say."""

    state: State
    pid: int
    pid_started_ticks: int
    about_bytes: int = 0
    chunks: int = 0
    data_offset: int = 0
    size_bytes: int = 0
    started_s: float = 0.0
    chosen_s: float = 0.0
    whole_s: float = 0.0

    @property
    def flags_offset(self) -> int:
        return PAGE_BYTES + self.about_bytes

    def to_bytes(self) -> bytes:
        return _HEAD.pack(
            MAGIC, VERSION, self.state, self.pid, self.pid_started_ticks, self.about_bytes, self.chunks,
            self.data_offset, self.size_bytes, self.started_s, self.chosen_s, self.whole_s,
        )  # fmt: skip

    @classmethod
    def from_bytes(cls, data: bytes) -> Head:
        try:
            magic, version, state, pid, ticks, about, chunks, offset, size, *times = _HEAD.unpack(data)
        except struct.error:
            raise Corrupt("a fetched segment has no header yet") from None
        if magic != MAGIC or version != VERSION:
            raise Corrupt(f"a fetched segment begins with {magic!r}, version {version}; this reads version {VERSION}")
        try:
            head = cls(
                state=State(state), pid=pid, pid_started_ticks=ticks, about_bytes=about, chunks=chunks,
                data_offset=offset, size_bytes=size, started_s=times[0], chosen_s=times[1], whole_s=times[2],
            )  # fmt: skip
        except ValueError:
            raise Corrupt(f"a fetched segment is in state {state}, which nobody knows") from None
        if head.state is not State.CHOOSING and (
            about > MOST_ABOUT_BYTES or offset % ALIGN_BYTES or offset < head.flags_offset + chunks
        ):
            raise Corrupt(f"a fetched segment puts its data at {offset}, behind {about} bytes of text, {chunks} chunks")
        return head


HEAD_BYTES = _HEAD.size


def state_bytes(state: State) -> bytes:
    return _STATE.pack(state)


@dataclass(frozen=True, kw_only=True)
class About:
    """What a segment holds."""

    store: str  # where it comes from
    passed_over: tuple[str, ...]  # newer checkpoints that could not be used, and why
    manifest: Manifest

    def to_bytes(self) -> bytes:
        manifest = self.manifest.to_bytes().decode()
        return json.dumps({"store": self.store, "passed_over": self.passed_over, "manifest": manifest}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> About:
        try:
            found = strict.loads(data, most_bytes=MOST_ABOUT_BYTES, most_depth=2)
            document = strict.table(found, "the document")
            store = strict.text(strict.member(document, "store"), "store", 4096)
            passed_over = strict.array(strict.member(document, "passed_over"), "passed_over", 10_000)
            for problem in passed_over:
                if type(problem) is not str:
                    raise strict.MalformedJson(f"passed_over has {strict.brief(problem)}, which is not text")
            text = strict.member(document, "manifest")
            if type(text) is not str:
                raise strict.MalformedJson(f"manifest is {strict.brief(text)}, not text")
        except strict.MalformedJson as error:
            raise Corrupt(f"a fetched segment does not say what it holds: {error}") from None
        return cls(store=store, passed_over=tuple(passed_over), manifest=Manifest.from_bytes(text.encode()))


def data_offset(about_bytes: int, chunks: int) -> int:
    return -(-(PAGE_BYTES + about_bytes + chunks) // ALIGN_BYTES) * ALIGN_BYTES


# --- files ----------------------------------------------------------------------------------------------------------


def default_path(run: str) -> Path:
    """Where a segment is looked for: named by user and run."""
    return SHARED_MEMORY / f"deepvm-{os.getuid()}" / check_run(run)


def make_folder(folder: Path) -> None:
    """The user's own folder in shared memory, where everybody may make one of any name."""
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise StoreError(f"{folder} cannot be made ({error.strerror}): give a path with --into") from None
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise AccessDenied(
            f"{folder} is not this user's alone (owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}): "
            "remove it, or give a path with --into"
        )


def open_private(path: Path) -> int:
    """Open a segment that nobody else could have written; FileNotFoundError where there is none."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise FileNotFoundError(path) from None
        raise AccessDenied(f"{path} cannot be opened: {error.strerror}") from None
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        os.close(fd)
        raise AccessDenied(
            f"{path} is not this user's alone (owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}): remove it"
        )
    return fd


def lock_if_free(fd: int, how: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def remove(path: Path) -> None:
    """Remove what a filler left that was killed, if it left something."""
    try:
        fd = open_private(path)
    except (OSError, StoreError):
        return
    try:
        unlink_if_same(path, fd)
    finally:
        os.close(fd)


def remove_orphans(*, but: str) -> None:
    """Remove the segments of runs other than ``but`` whose filler was killed. A trainer that reads one has it open, and
    keeps it; one that comes later than ORPHAN_S restores from its stores."""
    folder = default_path(but).parent
    try:
        names = [name for name in os.listdir(folder) if name != but]
    except OSError:  # there is none, or it is not ours to look into
        return
    for name in names:
        with suppress(OSError, StoreError):  # gone meanwhile, or not this user's alone
            fd = open_private(folder / name)
            try:
                old = time.time() - os.fstat(fd).st_mtime >= ORPHAN_S
                if old and lock_if_free(fd) and unlink_if_same(folder / name, fd):
                    log.info("removed %s, which a fetcher left that was killed", folder / name)
            finally:
                os.close(fd)


def unlink_if_same(path: Path, fd: int) -> bool:
    """Remove a file if it is still the one that is open; and the user's folder, if that was the last in it."""
    try:
        if not os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd)):
            return False
        os.unlink(path)
    except FileNotFoundError:
        return False
    if path.parent == SHARED_MEMORY / f"deepvm-{os.getuid()}":
        with suppress(OSError):  # another run has a segment there
            os.rmdir(path.parent)
    return True
