"""Write and read ``DIR/RUN/run.json``: what a node needs to serve a run's spilled checkpoints after a restart.

It is written before the first checkpoint of the run is spilled, and again when its session or the order of its
checkpoints changes. spill.py writes the checkpoints beside it; leftovers.py removes what a killed node left unfinished.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from deepvm import strict_json
from deepvm.errors import StoreError, UsageError
from deepvm.memnode.monitoring.log import Log
from deepvm.memnode.storage.run import Run
from deepvm.store.base import check_run
from deepvm.store.files.staged_file import StagedFile
from deepvm.store.files.store import explained, sync_directory
from deepvm.store.regular_file import read_regular

FORMAT = "deepvm-run/1"
PARTS = ".parts"
RUN_FILE = "run.json"
SET_ASIDE = ".set-aside"
STAGED = f".{RUN_FILE}.tmp*"
_MOST_BYTES = 2**20  # 256 past sessions of 200 characters, and the steps of the checkpoints


class RunFiles:
    """The run files of one spill directory. Several threads may use it."""

    def __init__(self, directory: Path, log: Log) -> None:
        self._directory, self._log = directory, log
        self._written: dict[
            str, dict[str, Any]
        ] = {}  # by run: its file's content; only of runs that this node loaded or wrote
        self._lock = threading.Lock()

    # --- writing --------------------------------------------------------------------------------------------------

    def keep(self, run: Run, order: Sequence[int]) -> None:
        """Write the run's file unless it is up to date; raise StoreError if that fails."""
        with run.lock, self._lock, explained(self._directory / run.name):
            document = _document(run, order)
            directory = self._directory / run.name
            if run.name not in self._written:
                self._set_aside_strangers(run.name)
            elif self._written[run.name] == document and (directory / RUN_FILE).exists():
                return
            make_private(directory)
            _write(directory / RUN_FILE, document)
            self._written[run.name] = document

    def update(self, run: Run) -> None:
        """Write a run's new session, if the run has a file. A failure is logged; the next spill tries again."""
        with run.lock, self._lock:
            before = self._written.get(run.name)
            if before is None:  # nothing of it is on the disk
                return
            document = _document(run, before.get("order", ()))
            path = self._directory / run.name / RUN_FILE
            try:
                _write(path, document)
                self._written[run.name] = document
            except (OSError, StoreError) as error:
                self._log.error("spill", run=run.name, error=f"{path} cannot be written: {error}")

    def forget(self, run: Run) -> None:
        """Remove an empty run's file, and its folder if nothing else is in it."""
        with run.lock, self._lock:
            if self._written.pop(run.name, None) is None:
                return
            directory = self._directory / run.name
            try:
                (directory / RUN_FILE).unlink(missing_ok=True)
                for folder in (directory, self._directory / PARTS / run.name):
                    remove_if_empty(folder)
            except OSError as error:
                self._log.error("spill", run=run.name, error=f"{directory} cannot be removed: {error}")

    def _set_aside_strangers(self, name: str) -> None:
        """Move a folder whose run file is missing or unreadable: its checkpoints may be of another owner, and are never
        overwritten or pruned."""
        for folder, suffix in ((self._directory / name, ""), (self._directory / PARTS / name, PARTS)):
            if not folder.is_dir() or not os.listdir(folder):
                continue
            parent = self._directory / SET_ASIDE
            make_private(parent)
            number = 1
            while (target := parent / f"{name}-{number}{suffix}").exists():
                number += 1
            os.rename(folder, target)
            sync_directory(parent)
            sync_directory(folder.parent)
            self._log.warning("set aside", run=name, folder=str(folder), now=str(target), reason="no usable run file")

    # --- reading back ---------------------------------------------------------------------------------------------

    def load(self) -> Iterator[dict[str, Any]]:
        """Yield every run file that can be read. Others are logged, left where they are, and never overwritten."""
        for path in sorted(self._directory.glob(f"*/{RUN_FILE}")):
            try:
                document = _read(path)
            except Exception as error:  # no file may stop the start
                self._log.error("spill", error=f"{path} cannot be used: {type(error).__name__} {error}"[:300])
                continue
            self._written[document["run"]] = document
            yield document


def _document(run: Run, order: Sequence[int]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "run": run.name,
        "verifier": run.verifier,
        "session": run.session,
        "past_sessions": list(run.past_sessions),
        **({"order": list(order)} if order else {}),
    }


def _write(path: Path, document: dict[str, Any]) -> None:
    with StagedFile(path.parent, path.name, private=True) as staged:
        staged.write([memoryview(json.dumps(document).encode())], 0)
        os.fsync(staged.fd)
        staged.rename(path)
    sync_directory(path.parent)


def _read(path: Path) -> dict[str, Any]:
    document = strict_json.loads(read_regular(path, _MOST_BYTES), most_bytes=_MOST_BYTES)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"not of format {FORMAT}")
    name, verifier, session = document["run"], document["verifier"], document["session"]
    past, order = document["past_sessions"], document.get("order", [])
    if name != path.parent.name or check_run(name) != name:
        raise UsageError(f"it is of run {name!r:.100}")
    if not isinstance(verifier, str) or len(bytes.fromhex(verifier)) != 32:
        raise ValueError("the verifier is not 64 hexadecimal digits")
    if not (session is None or isinstance(session, str)) or not _all(past, str) or not _all(order, int):
        raise ValueError("a session or a step has the wrong type")
    return document


def _all(values: object, kind: type) -> bool:
    return isinstance(values, list) and all(type(value) is kind for value in values)


def make_private(directory: Path) -> None:
    """Make a folder that only this user can enter, and sync it to disk before anything is in it."""
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        return
    sync_directory(directory.parent)


def remove_if_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):  # not empty, or not there
        directory.rmdir()
