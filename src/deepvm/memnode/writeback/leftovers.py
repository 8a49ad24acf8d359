"""Finish or remove what a killed node left unpublished in its spill directory, before spill.py loads it.

The rule of ownership: a checkpoint is its manifest and its bytes. Bytes without a manifest are removed, since nothing
says what they should be; unless the manifest was written and only its last rename is missing: then that is done. A
manifest, even an unreadable one, and the bytes beside it are never removed here.
"""

from __future__ import annotations

import os
from pathlib import Path

from deepvm.errors import StoreError
from deepvm.memnode.monitoring.log import Log
from deepvm.memnode.writeback.run_files import PARTS, RUN_FILE, STAGED, remove_if_empty
from deepvm.store.file_names import DATA, MANIFEST, stem, step_of
from deepvm.store.files.staged_file import lock_if_free
from deepvm.store.files.store import locked, sync_directory
from deepvm.store.files.unfinished import UNPUBLISHED, finish
from deepvm.store.regular_file import open_regular


def tidy(directory: Path, log: Log) -> None:
    """Finish or remove what is half written, in the folders of a node's runs."""
    for folder in _folders(directory, log):
        try:
            for staged in folder.glob(STAGED):
                staged.unlink(missing_ok=True)
            if folder.parent.name == PARTS or (folder / RUN_FILE).exists():
                with locked(folder):
                    _tidy(folder, log)
            remove_if_empty(folder)  # killed before its run file was written
        except Exception as error:  # what cannot be tidied stays; it must not stop the start
            log.error("spill", error=f"{folder} cannot be tidied: {type(error).__name__} {error}"[:300])
    remove_if_empty(directory / PARTS)


def _folders(directory: Path, log: Log) -> list[Path]:
    found = []
    for parent in (directory, directory / PARTS):
        try:
            found += [Path(e.path) for e in os.scandir(parent) if e.is_dir(follow_symlinks=False) and e.name[0] != "."]
        except FileNotFoundError:
            pass
        except OSError as error:
            log.error("spill", error=f"{parent} cannot be read: {error.strerror}")
    return sorted(found)


def _tidy(folder: Path, log: Log) -> None:
    names = sorted(os.listdir(folder))
    found = {name: match for name in names if (match := UNPUBLISHED.match(name))}
    unpublished = {name: match for name, match in found.items() if _is_free(folder / name, log)}
    changed = False
    for name, match in unpublished.items():
        if match[2] != MANIFEST or match[1] + MANIFEST in names:
            continue
        sources = [match[1] + DATA, *(other for other, o in unpublished.items() if o[1] == match[1] and o[2] == DATA)]
        finished = finish(folder, folder / name, match[1], [folder / s for s in sources if s in names])
        if finished is not None:
            log.warning("half spill finished", run=finished.run, step=finished.step)
            changed = True
    names = sorted(os.listdir(folder))
    for name in names:
        step = step_of(name, DATA)
        half = step is not None and stem(step) + MANIFEST not in names
        if half or name in unpublished:
            path = folder / name
            log.warning("half spill removed", file=str(path), size_bytes=path.stat().st_size)
            path.unlink()
            changed = True
    if changed:
        sync_directory(folder)


def _is_free(path: Path, log: Log) -> bool:
    """True if it is a writer's file, and no living writer has it locked."""
    try:
        fd = open_regular(path, os.O_RDWR | os.O_NOFOLLOW)
    except (OSError, StoreError) as error:  # of another owner, or read-only: it stays, the others are tidied
        log.error("spill", error=f"{path} is left alone: {getattr(error, 'strerror', None) or error}"[:300])
        return False
    try:
        return lock_if_free(fd)
    finally:
        os.close(fd)
