"""``DIR/RUN/run.json``: what a node must know of a run to serve its spilled checkpoints again.

Written before the first checkpoint of the run is spilled, and again when its session or the order of its checkpoints
changes. spill.py writes the checkpoints beside it; leftovers.py clears what a killed node left half written.
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
from deepvm.errors import UsageError
from deepvm.memnode.monitoring.log import Log
from deepvm.memnode.storage.run import Run
from deepvm.store.base import check_run
from deepvm.store.files.store import explained, sync_directory
from deepvm.store.regular_file import read_regular

FORMAT = "deepvm-run/1"
PARTS = ".parts"
RUN_FILE = "run.json"
SET_ASIDE = ".set-aside"
ASIDE = f".{RUN_FILE}.tmp"
_MOST_BYTES = 2**20  # 256 past sessions of 200 characters, and the steps of the checkpoints


class RunFiles:
    """The run files of one spill directory. Several threads may use it."""

    def __init__(self, directory: Path, log: Log) -> None:
        self._directory, self._log = directory, log
        self._written: dict[str, dict[str, Any]] = {}  # by run: what its file says; only of runs that are this node's
        self._lock = threading.Lock()

    # --- writing --------------------------------------------------------------------------------------------------

    def keep(self, run: Run, order: Sequence[int]) -> None:
        """Make sure that the run's file is on the disk and says what is so now; a StoreError where it cannot be."""
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
        """A session claimed the run: say so where the run has a file. A failure is logged; the next spill tries again,
        and fails with it."""
        with run.lock, self._lock:
            before = self._written.get(run.name)
            if before is None:  # nothing of it is on the disk
                return
            document = _document(run, before.get("order", ()))
            path = self._directory / run.name / RUN_FILE
            try:
                _write(path, document)
                self._written[run.name] = document
            except OSError as error:
                self._log.error("spill", run=run.name, error=f"{path} cannot be written: {error.strerror or error}")

    def forget(self, run: Run) -> None:
        """The run is empty and makes room for another: its file goes, and its folder if nothing else is in it."""
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
        """A folder of that name whose run file is missing or unreadable may hold checkpoints of somebody else: they are
        moved to where nothing is written, and never overwritten or pruned."""
        for folder, suffix in ((self._directory / name, ""), (self._directory / PARTS / name, PARTS)):
            if not folder.is_dir() or not os.listdir(folder):
                continue
            aside = self._directory / SET_ASIDE
            make_private(aside)
            number = 1
            while (target := aside / f"{name}-{number}{suffix}").exists():
                number += 1
            os.rename(folder, target)
            sync_directory(aside)
            sync_directory(folder.parent)
            self._log.warning("set aside", run=name, folder=str(folder), now=str(target), reason="no usable run file")

    # --- reading back ---------------------------------------------------------------------------------------------

    def load(self) -> Iterator[dict[str, Any]]:
        """Every run file that can be read. Another is logged, left where it is, and never overwritten."""
        for path in sorted(self._directory.glob(f"*/{RUN_FILE}")):
            try:
                document = _read(path)
            except Exception as error:  # whatever it is, one file must not stop the start
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
    """Aside, with the owner's rights only, safe on the disk, and renamed."""
    aside = path.with_name(ASIDE)
    aside.unlink(missing_ok=True)
    try:
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            json.dump(document, file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def _read(path: Path) -> dict[str, Any]:
    document = strict_json.loads(read_regular(path, _MOST_BYTES), most_bytes=_MOST_BYTES)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"not of format {FORMAT}")
    name, verifier, session = document["run"], document["verifier"], document["session"]
    past, order = document["past_sessions"], document.get("order", [])
    if name != path.parent.name or check_run(name) != name:
        raise UsageError(f"it speaks of run {name!r:.100}")
    if not isinstance(verifier, str) or len(bytes.fromhex(verifier)) != 32:
        raise ValueError("the verifier is not 64 hexadecimal digits")
    if not (session is None or isinstance(session, str)) or not _all(past, str) or not _all(order, int):
        raise ValueError("a session or a step is of another type")
    return document


def _all(values: object, kind: type) -> bool:
    return isinstance(values, list) and all(type(value) is kind for value in values)


def make_private(directory: Path) -> None:
    """A folder that only this user enters, on the disk before anything is in it."""
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        return
    sync_directory(directory.parent)


def remove_if_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):  # not empty, or not there
        directory.rmdir()
