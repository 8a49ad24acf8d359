"""The errors that users can meet, drawn in one place.

DeepvmError
├── UsageError            the request cannot be understood           exit code 2
│   ├── UnknownName       a name that nothing answers to, with the nearest ones
│   └── MalformedFile     a file that is not what it claims to be, with the place
├── Infeasible            the request is clear, but nothing fits it  exit code 3
├── SourceFailed          an outside source did not answer           exit code 1
├── StoreError            a store of checkpoints failed              exit code 1
│   ├── StoreUnavailable  it cannot be reached, or is out of room: retry, or use another
│   ├── AccessDenied      wrong token, wrong run key, or fenced off by a newer session
│   ├── NotFound          no such run, step or chunk
│   └── Corrupt           bytes that are not those that were saved
├── TemplateError         a template cannot start or fork workers    exit code 1
├── NoCapacity            a market has no such machine now          exit code 1 (deepvm.runtime.backends.base)
├── LedgerError           a run's ledger cannot be read or written   exit code 1 (deepvm.runtime.ledger.sqlite_file)
├── CheckpointError       a checkpoint cannot be made or restored    exit code 1
│   └── OverBudget        it would take more memory than it may
└── MissingExtra          an optional dependency is not installed    exit code 1
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path


def printable(text: str) -> str:
    """Escape control characters other than line ends, for terminals and logs."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


class DeepvmError(Exception):
    """The problem, the value and the fix, in one sentence. Parts of the text may come from untrusted input."""

    exit_code = 1

    def __str__(self) -> str:
        return printable(super().__str__())


def describe(error: BaseException) -> str:
    """Return an error's text, with its class if it is not a DeepvmError."""
    return str(error) if isinstance(error, DeepvmError) else f"{type(error).__name__}: {error}"


def listed(names: Sequence[str], separator: str = "; ", most: int = 8) -> str:
    """Join names into one text of bounded length, for an error."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + more


class UsageError(DeepvmError):
    exit_code = 2


class UnknownName(UsageError):
    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind, self.name = kind, name
        self.known = sorted(set(known))
        near = {k.lower(): k for k in self.known}
        matches = difflib.get_close_matches(name.lower(), near, n=3, cutoff=0.5)
        if matches:
            hint = f"did you mean {' or '.join(near[m] for m in matches)}?"
        elif 0 < len(self.known) <= 12:
            hint = f"known: {', '.join(self.known)}"
        else:
            hint = f"{len(self.known)} are known, none like it" if self.known else "there are none yet"
        super().__init__(f"no {kind} is called {name!r}: {hint}")


class MalformedFile(UsageError):
    def __init__(self, path: Path | str, problem: str, *, line: int | None = None) -> None:
        self.path, self.line = path, line
        super().__init__(f"{path}{'' if line is None else f', line {line}'}: {problem}")


class Infeasible(DeepvmError):
    """Nothing fits. ``cheapest_usd`` is the lowest price at which something would, if known."""

    exit_code = 3

    def __init__(self, message: str, *, cheapest_usd: float | None = None) -> None:
        self.cheapest_usd = cheapest_usd
        super().__init__(message)


class SourceFailed(DeepvmError):
    pass


class StoreError(DeepvmError):
    pass


class StoreUnavailable(StoreError):
    pass


class AccessDenied(StoreError):
    pass


class NotFound(StoreError):
    pass


class Corrupt(StoreError):
    pass


class CheckpointError(DeepvmError):
    pass


class OverBudget(CheckpointError):
    pass


class TemplateError(DeepvmError):
    pass


class MissingExtra(DeepvmError):
    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs an optional part: pip install 'deepvm[{extra}]'")
