"""A path -> a checked SQLite connection and the writer's lock, for ``ledger``."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import stat
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import quote

from deepvm.errors import DeepvmError, MalformedFile, UsageError

VERSION = 1
FORMAT = f"deepvm-ledger/{VERSION}"
APPLICATION_ID = 0x44564D4C  # "DVML": tells a ledger from other SQLite files
BUSY_S = 10.0  # readers and the writer block each other for moments only, at a checkpoint of the write-ahead log
LOCK_S = 2.0  # being_written() holds the lock for microseconds

_TABLES = {  # to the letter: ``_check_tables`` compares them
    "facts": "CREATE TABLE facts(name TEXT PRIMARY KEY NOT NULL, value TEXT NOT NULL)",
    "events": """CREATE TABLE events(
        id INTEGER PRIMARY KEY, at_s REAL NOT NULL, kind TEXT NOT NULL, machine TEXT, data TEXT NOT NULL
    )""",
}
_FORBIDDEN = (
    "BEFORE UPDATE ON facts",
    "BEFORE DELETE ON facts",
    "BEFORE UPDATE ON events",
    "BEFORE DELETE ON events",
    # INSERT OR REPLACE deletes without the triggers above
    "BEFORE INSERT ON facts WHEN EXISTS (SELECT 1 FROM facts WHERE name = NEW.name)",
    "BEFORE INSERT ON events WHEN EXISTS (SELECT 1 FROM events WHERE id = NEW.id)",
)


class LedgerError(DeepvmError):
    """The ledger cannot be written or read now."""


def create_database(path: Path, facts: Mapping[str, str]) -> None:
    """Create the file, which must not exist. Only its owner can read it: a script's arguments may be secret."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        raise UsageError(f"{path} exists already: resume that run, or give the new one another name") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be created: {error.strerror or error}") from None
    try:
        with closing(_connect(path, "mode=rw")) as database:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("BEGIN IMMEDIATE")
            for table in _TABLES.values():
                database.execute(table)
            for number, what in enumerate(_FORBIDDEN):
                refuse = "BEGIN SELECT RAISE(ABORT, 'a ledger only grows'); END"
                database.execute(f"CREATE TRIGGER forbidden_{number} {what} {refuse}")
            database.executemany("INSERT INTO facts VALUES (?, ?)", facts.items())
            database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            database.execute(f"PRAGMA user_version = {VERSION}")
            database.execute("COMMIT")
    except sqlite3.Error as error:
        raise LedgerError(f"{path} cannot be written: {error}") from None


def open_database(path: Path, *, write: bool) -> sqlite3.Connection:
    """Open a ledger of this version. Raise UsageError, MalformedFile or LedgerError if it is anything else."""
    if not path.is_file():
        raise UsageError(f"ledger {path} does not exist")
    if path.stat().st_size == 0:
        raise MalformedFile(path, "it is empty: its run ended before it began")
    try:
        return _checked(path, "mode=rw" if write else "mode=ro")
    except sqlite3.OperationalError as error:
        if not write and not path.with_name(path.name + "-wal").exists():
            # In a read-only folder the log's index cannot be created, and no other process writes.
            with suppress(sqlite3.Error):
                return _checked(path, "mode=ro&immutable=1")
        raise LedgerError(f"{path} cannot be opened: {error}") from None
    except sqlite3.DatabaseError as error:
        raise MalformedFile(path, f"not a valid ledger ({error})") from None


def _checked(path: Path, options: str) -> sqlite3.Connection:
    database = _connect(path, options)
    try:
        (application,) = database.execute("PRAGMA application_id").fetchone()
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if application != APPLICATION_ID:
            raise MalformedFile(path, "an SQLite file, but not a ledger")
        if version != VERSION:
            raise MalformedFile(
                path, f"its format is {version}, this deepvm reads {VERSION}: use the deepvm that wrote it"
            )
        _check_tables(path, database)
        # With a write-ahead log, the end of the process loses nothing. A loss of power may lose the last transactions.
        database.execute("PRAGMA synchronous = NORMAL")
    except BaseException:
        database.close()
        raise
    return database


def _check_tables(path: Path, database: sqlite3.Connection) -> None:
    """Refuse a file whose tables are not those of ``create_database``: a view, or a computed column, may have no
    end."""
    query = "SELECT type, substr(sql, 1, 1000) FROM sqlite_master WHERE name = ?"
    for name, wanted in _TABLES.items():
        found = database.execute(query, (name,)).fetchone()
        if found is None or found[0] != "table" or found[1] != wanted:
            raise MalformedFile(path, f"its {name} are not a table as every ledger has it")


def _connect(path: Path, options: str) -> sqlite3.Connection:
    return sqlite3.connect(
        f"file:{quote(str(path.absolute()))}?{options}",
        uri=True,
        timeout=BUSY_S,
        isolation_level=None,  # transactions are written out
        check_same_thread=False,  # the ledger holds a mutex instead
    )


def _lock_path(path: Path) -> Path:
    # Not the ledger itself: closing any descriptor of an SQLite file drops the process's locks on it.
    return path.with_name(path.name + ".lock")


def _open_lock(path: Path, flags: int) -> int:
    """Open the lock. OSError if something else is there: opening a FIFO would wait for its other end."""
    fd = os.open(_lock_path(path), flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o600)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(f"{_lock_path(path)} is not a regular file")
    return fd


def take_lock(path: Path) -> int:
    """Lock the ledger for its one writer, until the returned descriptor is closed or the process ends."""
    try:
        fd = _open_lock(path, os.O_CREAT | os.O_RDWR)
    except OSError as error:
        raise LedgerError(f"{path} cannot be written: {error.strerror or error}") from None
    deadline = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except OSError:
            if time.monotonic() > deadline:
                os.close(fd)
                raise LedgerError(f"{path} is being written by another process: that run is not over") from None
            time.sleep(0.02)


def being_written(path: Path) -> bool:
    """True if a process has it open for writing now, this one included."""
    try:
        fd = _open_lock(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False
