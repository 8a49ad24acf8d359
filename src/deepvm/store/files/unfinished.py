"""Finish what a killed writer had synced but not named: staged files in, checkpoints out. For store.py and nodes."""

from __future__ import annotations

import fcntl
import logging
import os
import re
from collections.abc import Collection
from pathlib import Path

import xxhash

from deepvm.errors import StoreError
from deepvm.store.base import MOST_MANIFEST_BYTES, Manifest
from deepvm.store.chunks import read_manifest
from deepvm.store.file_names import DATA, MANIFEST, step_of
from deepvm.store.regular_file import open_regular, read_regular

UNPUBLISHED = re.compile(r"\.(step-\d{12,})(\.safetensors|\.json)\.tmp-")

log = logging.getLogger("deepvm.store")


def unfinished(names: Collection[str]) -> list[str]:
    """Return the staged manifests of steps that have no manifest: their writer is about to publish, or was killed."""
    found = ((name, UNPUBLISHED.match(name)) for name in names)
    return sorted(name for name, match in found if match and match[2] == MANIFEST and match[1] + MANIFEST not in names)


def finish_all(folder: Path) -> bool:
    """Publish what a killed writer had written whole; return True if something was. Another's file that cannot be
    finished stays. The caller holds the folder's lock."""
    changed, names = False, os.listdir(folder)
    for name in unfinished(names):
        match = UNPUBLISHED.match(name)
        if match is None or not _is_free(folder / name):
            continue
        staged = [other for other in names if other.startswith(f".{match[1]}{DATA}.tmp-")]
        manifest = finish(folder, folder / name, match[1], [folder / one for one in (match[1] + DATA, *staged)])
        if manifest is not None:
            log.warning("step %d of run %s is whole: its writer was killed before the last rename",
                        manifest.step, manifest.run)  # fmt: skip
            changed = True
    return changed


def _is_free(path: Path) -> bool:
    """True if its writer is dead: it is not locked, on a file system with locks."""
    try:
        fd = open_regular(path, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:  # published meanwhile
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def finish(folder: Path, note: Path, name: str, sources: list[Path]) -> Manifest | None:
    """Give a manifest and its bytes their names, if both are whole; return it if so."""
    step = step_of(name + MANIFEST, MANIFEST)
    if step is None:
        return None
    try:
        manifest = read_manifest(read_regular(note, MOST_MANIFEST_BYTES), folder.name, step, str(note))
    except StoreError:  # truncated
        return None
    for source in sources:
        if _holds(source, manifest):
            os.rename(source, folder / (name + DATA))
            os.rename(note, folder / (name + MANIFEST))
            return manifest
    return None


def _holds(path: Path, manifest: Manifest) -> bool:
    try:
        file = open(open_regular(path), "rb")  # noqa: SIM115 - closed below
    except FileNotFoundError:
        return False
    with file:
        return os.fstat(file.fileno()).st_size == manifest.size_bytes and all(
            xxhash.xxh3_64_intdigest(file.read(manifest.span(chunk)[1])) == digest
            for chunk, digest in enumerate(manifest.digests)
        )
