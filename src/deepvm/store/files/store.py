"""Checkpoints as files: ``ROOT/RUN/step-000000000100.safetensors`` and, written last, its manifest ``.json``.

Bytes go into a file set aside under a name that no reader looks at (staged_file.py); publishing makes them safe, then
gives both files their names.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

from deepvm.errors import AccessDenied, Corrupt, NotFound, StoreError, StoreUnavailable
from deepvm.store.base import MOST_MANIFEST_BYTES, Manifest, MappedBytes, Store, check_run
from deepvm.store.chunks import (
    DATA,
    MANIFEST,
    UploadCheck,
    check_length,
    read_manifest,
    stem,
    verify_chunk,
    whole_steps,
)
from deepvm.store.files.mapping import is_local, map_file
from deepvm.store.files.staged_file import StagedFile, lock_if_free, remove_stale
from deepvm.store.regular_file import open_regular, read_regular
from deepvm.units import format_bytes

LOCK_S = 30.0  # a publication holds the run's lock for two renames; a dead holder's lock is gone at once
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}


class FileStore(Store):
    """A directory that keeps checkpoints; on a shared file system, of many machines. The files are as readable as the
    umask lets them be; if ``private``, by their owner only."""

    def __init__(self, root: str | os.PathLike[str], *, durable: bool = True, private: bool = False) -> None:
        self.root = Path(root).expanduser().absolute()
        self._durable, self._private = durable, private
        self._spares: dict[str, StagedFile | None] = {}  # of runs that this store writes: a deleted file to write over
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"file://{quote(str(self.root))}"

    @property
    def durable(self) -> bool:
        """Whether the directory outlives the cluster: taken to be so, as for a network file system."""
        return self._durable

    def runs(self) -> list[str]:
        with explained(self.root), contextlib.suppress(FileNotFoundError):
            return sorted(
                e.name for e in os.scandir(self.root) if e.is_dir() and _is_run(e.name) and self.steps(e.name)
            )
        return []

    def steps(self, run: str) -> list[int]:
        directory = self._directory(run)
        with explained(directory), contextlib.suppress(FileNotFoundError):
            return whole_steps(set(os.listdir(directory)))
        return []

    def manifest(self, run: str, step: int) -> Manifest:
        path = self._directory(run) / (stem(step) + MANIFEST)
        with explained(path):
            try:
                data = read_regular(path, MOST_MANIFEST_BYTES)
            except FileNotFoundError:
                raise NotFound(f"{self.root} has no step {step} of run {run}") from None
        manifest = read_manifest(data, run, step, str(path))
        with contextlib.suppress(OSError):  # gone, or not to be read: readers of its bytes say so
            found = os.stat(path.with_suffix(DATA)).st_size
            if found < manifest.size_bytes:
                raise Corrupt(
                    f"{path.with_suffix(DATA)} ends at {found} of {manifest.size_bytes} bytes: use another step"
                )
        return manifest

    def read_chunk(self, manifest: Manifest, chunk: int, into: memoryview) -> None:
        path = self._directory(manifest.run) / (stem(manifest.step) + DATA)
        buffer = into.cast("B") if into.format != "B" else into
        offset, done = check_length(manifest, chunk, buffer), 0
        with explained(path):
            try:
                fd = open_regular(path)
            except FileNotFoundError:
                raise NotFound(f"{path} is gone: use another step") from None
            try:
                while done < len(buffer):
                    count = os.preadv(fd, [buffer[done:]], offset + done)
                    if count == 0:
                        found = os.fstat(fd).st_size
                        raise Corrupt(f"{path} ends at {found} of {manifest.size_bytes} bytes: use another step")
                    done += count
            finally:
                os.close(fd)
        verify_chunk(manifest, chunk, buffer, str(path))

    def map(self, manifest: Manifest) -> MappedBytes | None:
        path = self._directory(manifest.run) / (stem(manifest.step) + DATA)
        with explained(path):
            if not is_local(path):
                return None
            return MappedBytes(view=memoryview(map_file(path, manifest.size_bytes)), complete=True)

    def writer(self, run: str, step: int, *, size_bytes: int, chunk_bytes: int) -> FileWriter:
        tally = UploadCheck(run, step, size_bytes, chunk_bytes)
        directory = self._directory(run)
        with explained(directory, size_bytes):
            _make_directory(directory)
            remove_stale(directory)
            with self._lock:
                spare = self._spares.get(run)
                self._spares[run] = None
            aside = spare or StagedFile(directory, stem(step) + DATA, private=self._private)
            try:
                if self._private:
                    os.fchmod(aside.fd, 0o600)  # what is written over may be an earlier version's
                aside.resize(size_bytes)
            except BaseException:
                aside.discard()
                raise
        return FileWriter(directory, aside, tally, private=self._private)

    def delete(self, run: str, step: int) -> None:
        """The manifest goes first. A store that also writes to this run keeps one deleted file to write over next
        (1.3 to 1.8 times as fast as a new file, and what is the same in both need not be written), where nobody can
        still be reading it."""
        directory = self._directory(run)
        with explained(directory):
            if not directory.is_dir():
                return
            with locked(directory):
                with self._lock:
                    spare_wanted = run in self._spares and self._spares[run] is None
                was = self._known(run, step) if spare_wanted else None
                spare_wanted &= _unlink(directory / (stem(step) + MANIFEST))
                data = directory / (stem(step) + DATA)
                if spare_wanted:
                    sync_directory(directory)  # before its bytes change, the manifest must be gone for good
                spare = StagedFile.recycled(data, was) if spare_wanted else None
                if spare is None:
                    _unlink(data)
                    return
            with self._lock:
                if self._spares.get(run, spare) is None:
                    self._spares[run], spare = spare, None
            if spare is not None:
                spare.discard()

    def _known(self, run: str, step: int) -> Manifest | None:
        """What a checkpoint's file should hold; each chunk is verified before it is trusted."""
        try:
            return self.manifest(run, step)
        except StoreError:
            return None

    def forget(self, run: str) -> None:
        """Write to this run no more: what is kept to write over goes."""
        with self._lock:
            spare = self._spares.pop(run, None)
        if spare is not None:
            spare.discard()

    def close(self) -> None:
        with self._lock:
            spares, self._spares = list(self._spares.values()), {}
        for spare in spares:
            if spare is not None:
                spare.discard()

    def _directory(self, run: str) -> Path:
        return self.root / check_run(run)


class FileWriter:
    """One checkpoint on its way into a file."""

    def __init__(self, directory: Path, aside: StagedFile, tally: UploadCheck, *, private: bool = False) -> None:
        self._directory, self._tally, self._private = directory, tally, private
        self._aside: StagedFile | None = aside

    def put(self, chunk: int, pieces: Sequence[memoryview], digest: int) -> None:
        length = sum(piece.nbytes for piece in pieces)
        offset, aside = self._tally.span(chunk, length), self._open()
        if not aside.has(chunk, offset, length, digest):
            with explained(aside.path, self._tally.size_bytes):
                aside.write(pieces, offset)
        self._tally.took(chunk, digest)

    def publish(self, manifest: Manifest) -> None:
        self._tally.check(manifest)
        aside, name = self._open(), stem(manifest.step)
        directory = self._directory
        with explained(directory, manifest.size_bytes):
            os.fsync(aside.fd)
            document = manifest.to_bytes()
            note = StagedFile(directory, name + MANIFEST, private=self._private)
            try:
                note.write([memoryview(document)], 0)
                os.fsync(note.fd)
                with locked(directory):
                    # A step saved again: at no moment, a crash included, one's manifest and the other's bytes.
                    if _unlink(directory / (name + MANIFEST)):
                        sync_directory(directory)
                    aside.rename(directory / (name + DATA))
                    note.rename(directory / (name + MANIFEST))
                    sync_directory(directory)
            except BaseException:
                note.discard()
                raise
        self._aside = None
        note.release()
        aside.release()

    def abort(self) -> None:
        aside, self._aside = self._aside, None
        if aside is not None:
            aside.discard()

    def _open(self) -> StagedFile:
        if self._aside is None:
            raise StoreError(f"step {self._tally.step} of {self._tally.run} is published or aborted already")
        return self._aside


def _make_directory(directory: Path) -> None:
    if directory.is_dir():
        return
    directory.mkdir(parents=True, exist_ok=True)
    for parent in (directory.parent, directory.parent.parent):
        with contextlib.suppress(OSError):  # those that are not ours need not be readable
            sync_directory(parent)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """One publication or deletion in a run at a time, over all processes."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + LOCK_S
        while not lock_if_free(fd):
            if time.monotonic() > deadline:
                raise StoreUnavailable(f"{directory} was locked by another writer for {LOCK_S:g} s")
            time.sleep(0.005)
        yield
    finally:
        os.close(fd)


def sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _unlink(path: Path) -> bool:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True


def _is_run(name: str) -> bool:
    try:
        check_run(name)
    except Exception:  # any name that is no run's is somebody else's directory
        return False
    return True


@contextlib.contextmanager
def explained(path: Path, needed_bytes: int = 0) -> Iterator[None]:
    """Every OSError as a StoreError that says what to do."""
    try:
        yield
    except OSError as error:
        raise _store_error(error, path, needed_bytes) from error


def _store_error(error: OSError, path: Path, needed_bytes: int) -> StoreError:
    reason = error.strerror or str(error)
    if error.errno in _NO_ROOM:
        free = "?"
        with contextlib.suppress(OSError):
            at = path if path.is_dir() else path.parent
            disk = os.statvfs(at)
            free = format_bytes(disk.f_bavail * disk.f_frsize)
        return StoreUnavailable(
            f"{path} has no room ({reason}): {format_bytes(needed_bytes)} needed, {free} free: "
            "delete old checkpoints, keep fewer, or use a larger disk"
        )
    if error.errno in _DENIED:
        return AccessDenied(f"{error.filename or path} may not be used ({reason}): change its permissions, or the path")
    return StoreUnavailable(f"{error.filename or path} failed: {reason}")
