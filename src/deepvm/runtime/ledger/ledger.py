"""The ledger of a run: events in, events out, in one append-only SQLite file (``sqlite_file``).

One process writes it; others may read it meanwhile. A resumed run continues its ledger: each session begins with
``run-started``. Events are numbered from 1 without gaps, in the order in which they were appended.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from deepvm import strict_json as strict
from deepvm.errors import MalformedFile, UsageError
from deepvm.events import Event, is_time
from deepvm.policy.conduct import Conduct
from deepvm.runtime.cluster import MOST_PLAN_BYTES, Cluster, Machine
from deepvm.runtime.ledger.sqlite_file import FORMAT, LedgerError, create_database, open_database, take_lock

_ROWS = 10_000  # read at once: a longer transaction would delay the checkpoint of the write-ahead log


class Ledger:
    """Made by ``create`` or ``open``. Several threads may call its methods."""

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
            raise MalformedFile(path, f"the ledger is incomplete ({type(error).__name__}: {error})") from None

    @staticmethod
    def create(path: Path | str, *, run: str, cluster: Cluster) -> Ledger:
        """Create a ledger and open it for writing."""
        described = asdict(cluster)
        plan = json.dumps(described.pop("plan"))
        create_database(Path(path), {"format": FORMAT, "run": run, "cluster": json.dumps(described), "plan": plan})
        return Ledger.open(path, write=True)

    @staticmethod
    def open(path: Path | str, *, write: bool = False) -> Ledger:
        """Open a ledger for reading or writing. Raise LedgerError if another process writes it."""
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
        """Append all events or none, in one transaction. They are safe from a kill of this process."""
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
        """Yield the present events in order, of one kind or of all, with numbers above ``after``."""
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
                    _check_types(at_s, machine)
                    event = Event(at_s=at_s, kind=found, machine=machine, data=data)
                except (ValueError, TypeError, UsageError) as error:
                    raise MalformedFile(self.path, f"event {number} cannot be read: {error}") from None
                yield event
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
        raise next(problem for row in rows if (problem := self._problem(row[0], row[4])) is not None)

    def _problem(self, number: int, text: str) -> MalformedFile | None:
        """Return what is wrong with an event's data, if anything."""
        try:
            if isinstance(json.loads(text), dict):
                return None
            why = f"its data is {text[:40]}"
        except (ValueError, TypeError, RecursionError) as error:
            why = str(error)
        return MalformedFile(self.path, f"event {number} cannot be read: {why}")

    def close(self) -> None:
        with self._mutex:
            self._database.close()
            if self._lock_fd is not None:
                os.close(self._lock_fd)
                self._lock_fd = None

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Let one thread in at a time, and translate SQLite's errors."""
        with self._mutex:
            try:
                yield
            except sqlite3.ProgrammingError as error:
                raise LedgerError(f"{self.path} is not open any more: {error}") from None
            except sqlite3.DatabaseError as error:
                # A locked, full or read-only file is an operational error, but so are a missing table and invalid text.
                damaged = "no such" in str(error) or "decode" in str(error)
                if isinstance(error, sqlite3.OperationalError) and not damaged:
                    raise LedgerError(f"{self.path} cannot be used now: {error}") from None
                raise MalformedFile(self.path, f"it is damaged ({error})") from None


def _check_types(at_s: Any, machine: Any) -> None:
    """Check what SQLite does not: a column of numbers may have text."""
    if type(at_s) not in (int, float) or not is_time(at_s):
        raise ValueError(f"its time is {strict.brief(at_s)}")
    if machine is not None and type(machine) is not str:
        raise ValueError(f"its machine is {strict.brief(machine)}")


def _row(event: Event) -> tuple[float, str, str | None, str]:
    if not is_time(event.at_s):
        raise UsageError(f"an event of kind {event.kind} has at_s={event.at_s}, which is not a valid time")
    try:
        data = json.dumps(dict(event.data), allow_nan=False)
    except ValueError:
        data = json.dumps(_finite(dict(event.data)))
    except TypeError as error:
        raise UsageError(f"an event of kind {event.kind} cannot be written as JSON: {error}") from None
    return event.at_s, event.kind, event.machine, data


def _finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON does not have, by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def _fact(text: str) -> dict[str, Any]:
    return strict.table(strict.loads(text, most_bytes=MOST_PLAN_BYTES), "a fact")


def _cluster(described: dict[str, Any], plan: dict[str, Any]) -> Cluster:
    machines = tuple(Machine(**machine) for machine in described.pop("machines"))
    conduct = described.pop("conduct", None)
    return Cluster(
        machines=machines,
        notes=tuple(described.pop("notes")),
        failover=tuple(Machine(**machine) for machine in described.pop("failover", ())),
        conduct=None if conduct is None else Conduct.from_json(conduct),
        plan=plan,
        **described,
    )
