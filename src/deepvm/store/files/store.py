"""Checkpoints as files: ``ROOT/RUN/step-000000000100.safetensors`` and, written last, its manifest ``.json``.

Bytes go into a staged file, under a name that no reader looks at (staged_file.py). Publishing syncs them to disk, then
gives both files their names.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

from deepvm.errors import AccessDenied, NotFound, StoreError, StoreUnavailable
from deepvm.store.base import MOST_MANIFEST_BYTES, Manifest, MappedBytes, Store, check_run, is_run
from deepvm.store.chunks import UploadCheck, as_bytes, check_length, read_manifest, truncated, verify_chunk
from deepvm.store.file_names import DATA, MANIFEST, stem, whole_steps
from deepvm.store.files.mapping import is_local, map_file
from deepvm.store.files.staged_file import StagedFile, lock_if_free, remove_stale
from deepvm.store.files.unfinished import finish_all, unfinished
from deepvm.store.regular_file import open_regular, read_regular
from deepvm.units import format_bytes

log = logging.getLogger("deepvm.store")

LOCK_S = 30.0  # a publication holds the run's lock for two renames; a dead holder's lock is gone at once
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_GONE = "{} is missing: use another step"
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
        """True if the directory outlives the cluster, as that of a network file system does."""
        return self._durable

    def runs(self) -> list[str]:
        with explained(self.root), contextlib.suppress(FileNotFoundError):
            return sorted(e.name for e in os.scandir(self.root) if e.is_dir() and is_run(e.name) and self.steps(e.name))
        return []

    def steps(self, run: str) -> list[int]:
        directory = self._directory(run)
        with explained(directory), contextlib.suppress(FileNotFoundError):
            names = set(os.listdir(directory))
            if unfinished(names):
                self._finish(directory)
                names = set(os.listdir(directory))
            return whole_steps(names)
        return []

    def _finish(self, directory: Path) -> None:
        """Publish what a killed writer had written whole. A reader without write access leaves it."""
        try:
            with locked(directory):
                if finish_all(directory):
                    sync_directory(directory)
        except (OSError, StoreError) as error:
            log.warning("what a killed writer left in %s cannot be published: %s", directory, error)

    def manifest(self, run: str, step: int) -> Manifest:
        path = self._directory(run) / (stem(step) + MANIFEST)
        with explained(path, missing=f"{self.root} has no step {step} of run {run}"):
            data = read_regular(path, MOST_MANIFEST_BYTES)
        manifest = read_manifest(data, run, step, str(path))
        with contextlib.suppress(OSError):  # missing or not readable: reading its chunks reports that
            found_bytes = os.stat(path.with_suffix(DATA)).st_size
            if found_bytes < manifest.size_bytes:
                raise truncated(path.with_suffix(DATA), found_bytes, manifest)
        return manifest

    def read_chunk(self, manifest: Manifest, chunk: int, into: memoryview) -> None:
        path, buffer = self._data(manifest), as_bytes(into)
        offset, done = check_length(manifest, chunk, buffer), 0
        with explained(path, missing=_GONE.format(path)), open(open_regular(path), "rb", buffering=0) as file:
            while done < len(buffer):
                count = os.preadv(file.fileno(), [buffer[done:]], offset + done)
                if count == 0:
                    raise truncated(path, os.fstat(file.fileno()).st_size, manifest)
                done += count
        verify_chunk(manifest, chunk, buffer, str(path))

    def map(self, manifest: Manifest) -> MappedBytes | None:
        path = self._data(manifest)
        with explained(path, missing=_GONE.format(path)):
            if not is_local(path):
                return None
            return MappedBytes(view=memoryview(map_file(path, manifest)))

    def writer(self, run: str, step: int, *, size_bytes: int, chunk_bytes: int) -> FileWriter:
        check = UploadCheck(run, step, size_bytes, chunk_bytes)
        directory = self._directory(run)
        with explained(directory, size_bytes):
            _make_directory(directory)
            if unfinished(os.listdir(directory)):
                self._finish(directory)
            remove_stale(directory)
            with self._lock:
                spare = self._spares.get(run)
                self._spares[run] = None
            staged = spare or StagedFile(directory, stem(step) + DATA, private=self._private)
            try:
                if self._private:
                    os.fchmod(staged.fd, 0o600)  # a recycled file may be an earlier version's
                staged.resize(size_bytes)
            except BaseException:
                staged.discard()
                raise
        return FileWriter(directory, staged, check, private=self._private)

    def delete(self, run: str, step: int) -> None:
        """Remove the manifest, then the bytes. A store that also writes this run keeps one deleted file to write over,
        if no reader has it open: that is 1.3 to 1.8 times as fast as a new file, and equal chunks need no writing."""
        directory = self._directory(run)
        with explained(directory):
            if not directory.is_dir():
                return
            with locked(directory):
                remove_stale(directory, stem(step) + ".")  # or what a killed writer left of it would be published
                with self._lock:
                    spare_wanted = run in self._spares and self._spares[run] is None
                before = self._readable_manifest(run, step) if spare_wanted else None
                spare_wanted &= _unlink(directory / (stem(step) + MANIFEST))
                data = directory / (stem(step) + DATA)
                if spare_wanted:
                    sync_directory(directory)  # before its bytes change, the manifest must be gone for good
                spare = StagedFile.recycled(data, before) if spare_wanted else None
                if spare is None:
                    _unlink(data)
                    return
            with self._lock:
                if self._spares.get(run, spare) is None:
                    self._spares[run], spare = spare, None
            if spare is not None:
                spare.discard()

    def _readable_manifest(self, run: str, step: int) -> Manifest | None:
        try:
            return self.manifest(run, step)
        except StoreError:
            return None

    def forget(self, run: str) -> None:
        """Write to this run no more: discard the file that is kept to write over."""
        with self._lock:
            spare = self._spares.pop(run, None)
        if spare is not None:
            spare.discard()

    def close(self) -> None:
        for run in list(self._spares):
            self.forget(run)

    def _directory(self, run: str) -> Path:
        return self.root / check_run(run)

    def _data(self, manifest: Manifest) -> Path:
        return self._directory(manifest.run) / (stem(manifest.step) + DATA)


class FileWriter:
    """Write one checkpoint into a staged file, and publish it."""

    def __init__(self, directory: Path, staged: StagedFile, check: UploadCheck, *, private: bool = False) -> None:
        self._directory, self._uploaded, self._private = directory, check, private
        self._staged: StagedFile | None = staged

    def put(self, chunk: int, pieces: Sequence[memoryview], digest: int) -> None:
        length = sum(piece.nbytes for piece in pieces)
        offset, staged = self._uploaded.span(chunk, length), self._open()
        if not staged.has(chunk, offset, length, digest):
            with explained(staged.path, self._uploaded.size_bytes):
                staged.write(pieces, offset)
        self._uploaded.put(chunk, digest)

    def publish(self, manifest: Manifest) -> None:
        self._uploaded.check(manifest)
        staged, directory, name = self._open(), self._directory, stem(manifest.step)
        with explained(directory, manifest.size_bytes):
            os.fsync(staged.fd)
            with StagedFile(directory, name + MANIFEST, private=self._private) as document:
                document.write([memoryview(manifest.to_bytes())], 0)
                os.fsync(document.fd)
                with locked(directory):
                    # A step saved again: at no moment, a crash included, one's manifest and the other's bytes. After
                    # a crash here, unfinished.py publishes the new one: both of its files are on the disk.
                    sync_directory(directory)
                    if _unlink(directory / (name + MANIFEST)):
                        sync_directory(directory)
                    staged.rename(directory / (name + DATA))
                    document.rename(directory / (name + MANIFEST))
                    sync_directory(directory)
        self._staged = None
        staged.release()

    def abort(self) -> None:
        staged, self._staged = self._staged, None
        if staged is not None:
            staged.discard()

    def _open(self) -> StagedFile:
        if self._staged is None:
            raise StoreError(f"step {self._uploaded.step} of {self._uploaded.run} is published or aborted already")
        return self._staged


def _make_directory(directory: Path) -> None:
    if directory.is_dir():
        return
    directory.mkdir(parents=True, exist_ok=True)
    for parent in (directory.parent, directory.parent.parent):
        with contextlib.suppress(OSError):  # those that are not ours need not be readable
            sync_directory(parent)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock a run's directory: one publication or deletion at a time, over all processes."""
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


@contextlib.contextmanager
def explained(path: Path, needed_bytes: int = 0, *, missing: str | None = None) -> Iterator[None]:
    """Turn every OSError into a StoreError with a fix; a missing file into NotFound, if ``missing`` explains it."""
    try:
        yield
    except OSError as error:
        if missing is not None and isinstance(error, FileNotFoundError):
            raise NotFound(missing) from None
        raise _store_error(error, path, needed_bytes) from error


def _store_error(error: OSError, path: Path, needed_bytes: int) -> StoreError:
    reason = error.strerror or str(error)
    if error.errno in _NO_ROOM:
        free = "?"
        with contextlib.suppress(OSError):
            disk = os.statvfs(path if path.is_dir() else path.parent)
            free = format_bytes(disk.f_bavail * disk.f_frsize)
        return StoreUnavailable(
            f"{path} has no room ({reason}): {format_bytes(needed_bytes)} needed, {free} free: "
            "delete old checkpoints, keep fewer, or use a larger disk"
        )
    if error.errno in _DENIED:
        return AccessDenied(f"{error.filename or path} cannot be used ({reason}): change its permissions, or the path")
    return StoreUnavailable(f"{error.filename or path} failed: {reason}")
