"""A clone of SkyPilot's catalogue repository: days in, a catalogue for each day with a commit out. Only git is used."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from deepvm.catalog.model import Catalog
from deepvm.catalog.report import Progress
from deepvm.catalog.sources import skypilot
from deepvm.errors import SourceFailed, UsageError

TIMEOUT_S = 120.0  # for one command of git; a file of 5 MB takes well under a second
_PATH = re.compile(r"(?:catalogs/)?v(\d+)/([^/]+)/vms\.csv\Z")


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The file of one day: its last commit, and the object that holds the bytes."""

    day: date
    commit: str
    path: str
    blob: str


def snapshots(repository: Path, *, provider: str, first: date, last: date) -> list[Snapshot]:
    """List the days from first to last on which the provider's file changed, by commit dates in UTC."""
    if first > last:
        raise UsageError(f"--from {first} is after --to {last}")
    text = _git(
        repository, "log", "--first-parent", "--date=format-local:%Y-%m-%d", "--format=%H %cd",
        "--", f":(glob)**/{provider}/vms.csv",
    )  # fmt: skip
    newest: dict[date, str] = {}
    for line in text.decode().splitlines():
        commit, day = line.split()
        when = date.fromisoformat(day)
        if first <= when <= last:
            newest.setdefault(when, commit)  # git lists the newest first
    found = [_snapshot(repository, day, newest[day], provider) for day in sorted(newest)]
    kept = [one for one in found if one is not None]
    if not kept:
        raise UsageError(
            f"{repository} has no commit of {provider}/vms.csv from {first} to {last}: check --provider and the dates"
        )
    return kept


def read_all(
    repository: Path, wanted: list[Snapshot], *, provider: str, name: str, progress: Progress | None = None
) -> Iterator[tuple[date, Catalog]]:
    """Read the catalogues one by one, oldest first."""
    before: tuple[str, Catalog] | None = None
    for number, one in enumerate(wanted, 1):
        if progress is not None:
            progress(f"{one.day}: {number} of {len(wanted)}")
        if before is None or before[0] != one.blob:
            content = _git(repository, "cat-file", "blob", one.blob)
            source = f"{one.path} of {one.commit[:12]}"
            catalog, _ = skypilot.parse(content, source, provider=provider, name=name, seen=one.day, origin=source)
            before = one.blob, catalog
        yield one.day, before[1]


def _snapshot(repository: Path, day: date, commit: str, provider: str) -> Snapshot | None:
    """Return the file of the newest catalogue format in a commit; None if the commit removed it."""
    newest: tuple[int, str, str] | None = None
    for entry in _git(repository, "ls-tree", "-r", "-z", "--full-tree", commit).split(b"\0"):
        about, _, path = entry.decode(errors="replace").partition("\t")
        match = _PATH.fullmatch(path)
        if match and match[2] == provider and (newest is None or int(match[1]) > newest[0]):
            newest = int(match[1]), path, about.split()[2]
    return None if newest is None else Snapshot(day=day, commit=commit, path=newest[1], blob=newest[2])


def _git(repository: Path, *words: str) -> bytes:
    if not repository.is_dir():
        raise UsageError(f"{repository} is not a folder: give a clone of a catalogue repository")
    command = ["git", "--no-pager", "-C", str(repository), *words]
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=TIMEOUT_S, check=False, stdin=subprocess.DEVNULL,
            env={**_environment(), "TZ": "UTC0", "LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"},
        )  # fmt: skip
    except FileNotFoundError:
        raise SourceFailed("git was not found: install it to read the history of a catalogue") from None
    except subprocess.TimeoutExpired:
        raise SourceFailed(f"git {words[0]} took over {TIMEOUT_S:g} s in {repository}: try a local disk") from None
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip().splitlines()
        raise SourceFailed(f"git cannot read {repository}: {reason[0][:200] if reason else done.returncode}")
    return done.stdout


def _environment() -> dict[str, str]:
    """Return this process's environment without the variables that point git to another repository."""
    return {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
