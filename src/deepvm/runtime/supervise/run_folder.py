"""A run's name -> its folder: settings, token, ledger and logs, for reports and resumption."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from deepvm import strict_json as strict
from deepvm.errors import AccessDenied, MalformedFile, UnknownName, UsageError
from deepvm.runtime.run_spec import RunSpec
from deepvm.store.regular_file import write_private

FORMAT = "deepvm-run/1"
MOST_SETTINGS_BYTES = 128 * 2**20  # the plan is in it
FOLDER_VARIABLE = "DEEPVM_RUNS"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")


def runs_folder() -> Path:
    if given := os.environ.get(FOLDER_VARIABLE):
        return Path(given)
    import platformdirs

    return platformdirs.user_data_path("deepvm") / "runs"


class RunFolder:
    """``settings.json`` (the RunSpec, and where it runs), ``token``, ``ledger.sqlite``, ``machines/``, and
    ``profile.json`` (what it measured)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ledger, self.token_file, self.machines = path / "ledger.sqlite", path / "token", path / "machines"
        self.profile = path / "profile.json"
        self._settings, self._stop = path / "settings.json", path / "stop"

    @property
    def name(self) -> str:
        return self.path.name

    @staticmethod
    def create(name: str, settings: Mapping[str, Any]) -> RunFolder:
        if not _NAME.match(name):
            raise UsageError(f"{name!r} is not a valid run name: use at most 64 letters, digits, '.', '_' and '-'")
        folder = RunFolder(runs_folder() / name)
        try:
            folder.path.parent.mkdir(parents=True, exist_ok=True)
            folder.path.mkdir(mode=0o700)
            folder.machines.mkdir(mode=0o700)
            write_private(folder.token_file, secrets.token_hex(32))
            write_private(folder._settings, json.dumps({"format": FORMAT, **settings}, indent=1))
        except FileExistsError:
            raise UsageError(f"run {name!r} exists already: continue it with deepvm run --resume {name}") from None
        except OSError as error:
            raise UsageError(f"the run's folder {folder.path} cannot be created: {error.strerror or error}") from None
        return folder

    @staticmethod
    def find(name: str) -> RunFolder:
        """Return the folder of a run by its name, or by a path with a separator (``./NAME``). It names the script that
        is run, so it must be the user's own, and others must not be able to write to it."""
        is_path = os.sep in name
        folder = RunFolder(Path(name).resolve() if is_path else runs_folder() / name)
        if not (is_path or _NAME.match(name)) or not folder._settings.is_file():
            raise UnknownName("run", name, [found.name for found in all_runs()])
        for path in (folder.path, folder._settings):
            found = path.stat()
            if found.st_uid != os.getuid() or found.st_mode & 0o022:
                raise AccessDenied(
                    f"{path} is not this user's alone (owner {found.st_uid}, {stat.filemode(found.st_mode)}) and could "
                    "name any script: use a folder of your own that others cannot write to"
                )
        return folder

    def settings(self) -> dict[str, Any]:
        hint = "every run of deepvm has settings"
        found = strict.read_file(self._settings, most_bytes=MOST_SETTINGS_BYTES, hint=hint)
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise MalformedFile(self._settings, f"its format is not {FORMAT!r}: use the deepvm that made this run")
        return found

    @property
    def backend_name(self) -> str:
        """Where the run's machines are: local, ec2 or skypilot. A run whose other settings are damaged can be ended."""
        try:
            return strict.text(strict.member(self.settings(), "on"), "on", 40, least=1)
        except strict.MalformedJson as error:
            raise MalformedFile(self._settings, f"not the settings of a run: {error}") from None

    def checked_settings(self) -> dict[str, Any]:
        """Return the settings, whose ``on``, ``plan`` and ``settings`` are those of a run."""
        found = self.settings()
        try:
            strict.text(strict.member(found, "on"), "on", 40, least=1)
            strict.member(found, "plan")
            RunSpec.from_settings(strict.table(strict.member(found, "settings"), "settings"))
        except strict.MalformedJson as error:
            raise MalformedFile(self._settings, f"not the settings of a run: {error}") from None
        return found

    def keep(self, settings: Mapping[str, Any]) -> None:
        """Replace the settings atomically."""
        new = self._settings.with_name("settings.json.new")
        try:
            write_private(new, json.dumps({"format": FORMAT, **settings}, indent=1))
            new.replace(self._settings)
        except OSError as error:
            raise UsageError(f"{self._settings} cannot be written: {error.strerror or error}") from None

    def started(self, spec: RunSpec, **facts: Any) -> RunSpec:
        """Return the spec with this folder's files and the facts that are known at the start of a run."""
        return replace(spec, run=self.name, folder=self.path, token_file=self.token_file, **facts)

    def request_stop(self) -> None:
        """Ask the process that supervises the run to end it after a save."""
        self._stop.touch(mode=0o600)

    def stop_requested(self) -> bool:
        """Return True, once, if another process asked for the run's end."""
        try:
            self._stop.unlink()
        except FileNotFoundError:
            return False
        return True

    def remove(self) -> None:
        """Delete the folder of a run that never began."""
        shutil.rmtree(self.path, ignore_errors=True)

    def log_of(self, machine: str) -> Path:
        return self.machines / machine.replace("/", "-") / "log.txt"


def all_runs() -> list[RunFolder]:
    folder = runs_folder()
    if not folder.is_dir():
        return []
    return [RunFolder(path) for path in sorted(folder.iterdir()) if (path / "settings.json").is_file()]
