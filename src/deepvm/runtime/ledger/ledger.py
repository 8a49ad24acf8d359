"""The ledger of a run: every event that happened, in one SQLite file that only ever grows.

One process writes it, any number read it meanwhile. A run that is resumed goes on in its ledger: each session begins
with ``run-started``. Events are numbered from 1 without gaps, in the order in which they were appended.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from deepvm import strict_json as strict
from deepvm.errors import MalformedFile, UsageError
from deepvm.events import Event, is_time
from deepvm.runtime.cluster import MOST_PLAN_BYTES, Cluster, Machine
from deepvm.runtime.ledger.sqlite_file import (
    FORMAT,
    LedgerError,
    being_written,
    create_database,
    open_database,
    take_lock,
)

_ROWS = 10_000  # read at once: no reader keeps the log from being folded in for long


class Ledger:
    """Made by ``create`` or ``open``; closed by ``with``. Its methods may be called from several threads."""

    def __init__(self, path: Path, database: sqlite3.Connection, lock_fd: int | None) -> None:
        self.path = path
        self._database = database
        self._lock_fd = lock_fd  # held by the one writer
        self._mutex = threading.Lock()
        with self._guarded():
            facts: dict[str, str] = dict(database.execute("SELECT name, value FROM facts"))
        try:
            self.run: str = facts["run"]
            self.cluster: Cluster = _cluster(_fact(facts["cluster"]), _fact(facts["plan"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise MalformedFile(path, f"it is no whole ledger ({type(error).__name__}: {error})") from None

    @staticmethod
    def create(path: Path | str, *, run: str, cluster: Cluster) -> Ledger:
        """A new ledger, open for writing."""
        machines = [_values(machine) for machine in cluster.machines]
        told = {name: value for name, value in _values(cluster).items() if name != "plan"}
        facts = {
            "format": FORMAT,
            "run": run,
            "cluster": json.dumps({**told, "machines": machines}),
            "plan": json.dumps(dict(cluster.plan)),
        }
        create_database(Path(path), facts)
        return Ledger.open(path, write=True)

    @staticmethod
    def open(path: Path | str, *, write: bool = False) -> Ledger:
        """For reading, or for the one process that goes on writing it: LedgerError where another one does."""
        path = Path(path)
        database = open_database(path, write=write)
        lock_fd = None
        try:
            lock_fd = take_lock(path) if write else None
            return Ledger(path, database, lock_fd)
        except BaseException:
            database.close()
            if lock_fd is not None:
                os.close(lock_fd)
            raise

    def append(self, events: Iterable[Event]) -> None:
        """All of them or none, in one transaction. What was appended outlives a kill of this process."""
        if self._lock_fd is None:
            raise UsageError(f"{self.path} is open for reading only: open it with write=True")
        rows = [_row(event) for event in events]
        if not rows:
            return
        with self._guarded():
            self._database.execute("BEGIN IMMEDIATE")
            try:
                self._database.executemany("INSERT INTO events(at_s, kind, machine, data) VALUES (?, ?, ?, ?)", rows)
                self._database.execute("COMMIT")
            except BaseException:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                raise

    def events(self, kind: str | None = None, after: int = 0) -> Iterator[Event]:
        """Those with a number above ``after`` that are there now, in order."""
        return (event for _, event in self.numbered(kind, after))

    def numbered(self, kind: str | None = None, after: int = 0) -> Iterator[tuple[int, Event]]:
        """The same with their numbers, for who follows a ledger: the last number is the next ``after``."""
        wanted, kinds = ("", ()) if kind is None else ("AND kind = ?", (kind,))
        query = (
            f"SELECT id, at_s, kind, machine, data FROM events WHERE id > ? AND id <= ? {wanted} ORDER BY id LIMIT ?"  # noqa: S608
        )
        with self._guarded():
            (last,) = self._database.execute("SELECT coalesce(max(id), 0) FROM events").fetchone()
        while after < last:
            with self._guarded():
                rows = self._database.execute(query, (after, last, *kinds, _ROWS)).fetchall()
            for row, data in zip(rows, self._parsed(rows), strict=True):
                number, at_s, found, machine, _ = row
                try:
                    event = Event(at_s=at_s, kind=found, machine=machine, data=data)
                except (ValueError, TypeError, UsageError) as error:
                    raise MalformedFile(self.path, f"event {number} cannot be read: {error}") from None
                yield number, event
            if len(rows) < _ROWS:
                return
            after = rows[-1][0]

    def _parsed(self, rows: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
        try:
            parsed = json.loads(f"[{','.join([row[4] for row in rows])}]")  # at once: much faster than one by one
            if len(parsed) == len(rows) and all(type(data) is dict for data in parsed):
                return cast("list[dict[str, Any]]", parsed)
        except (ValueError, TypeError, RecursionError):
            pass
        for number, *_, data in rows:
            try:
                if not isinstance(json.loads(data), dict):
                    raise ValueError(f"its data is {data[:40]}")
            except (ValueError, TypeError, RecursionError) as error:
                raise MalformedFile(self.path, f"event {number} cannot be read: {error}") from None
        raise MalformedFile(self.path, f"events from {rows[0][0]} on cannot be read")

    @property
    def being_written(self) -> bool:
        """Whether a process has it open for writing now, this one included."""
        return being_written(self.path)

    def close(self) -> None:
        with self._mutex:
            self._database.close()
            if self._lock_fd is not None:
                os.close(self._lock_fd)
                self._lock_fd = None

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """One thread at a time, and SQLite's errors as sentences."""
        with self._mutex:
            try:
                yield
            except sqlite3.ProgrammingError as error:
                raise LedgerError(f"{self.path} is not open any more: {error}") from None
            except sqlite3.DatabaseError as error:
                # Locked, full and read-only are operational errors of whole files; a missing table and text that is
                # none are called operational, too.
                damaged = "no such" in str(error) or "decode" in str(error)
                if isinstance(error, sqlite3.OperationalError) and not damaged:
                    raise LedgerError(f"{self.path} cannot be used now: {error}") from None
                raise MalformedFile(self.path, f"it is damaged ({error})") from None


def _row(event: Event) -> tuple[float, str, str | None, str]:
    if not is_time(event.at_s):
        raise UsageError(f"an event of kind {event.kind} happened at {event.at_s}, which is no time")
    try:
        data = json.dumps(dict(event.data), allow_nan=False)
    except ValueError:
        data = json.dumps(_finite(dict(event.data)))
    except TypeError as error:
        raise UsageError(f"an event of kind {event.kind} cannot be written as JSON: {error}") from None
    return event.at_s, event.kind, event.machine, data


def _finite(value: Any) -> Any:
    """The same without NaN and infinities, which JSON does not have: missing is null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def _fact(text: str) -> dict[str, Any]:
    return strict.table(strict.loads(text, most_bytes=MOST_PLAN_BYTES), "a fact")


def _values(value: Machine | Cluster) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _cluster(told: dict[str, Any], plan: dict[str, Any]) -> Cluster:
    machines = tuple(Machine(**machine) for machine in told.pop("machines"))
    return Cluster(machines=machines, notes=tuple(told.pop("notes")), plan=plan, **told)
