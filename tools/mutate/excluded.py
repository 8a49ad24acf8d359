"""What is not counted: places that cannot run on this kind of machine, and faults that change no behaviour."""

from __future__ import annotations

from tools.mutate.faults import Fault

# (path, function or "" for all of it): why no test here can execute it
CANNOT_RUN: dict[tuple[str, str], str] = {}

# (path, source line, replacement): why nothing differs
NO_DIFFERENCE: dict[tuple[str, str, str], str] = {}


def reason(fault: Fault, text: str) -> str:
    """Return why a fault is not counted, or "" if it is."""
    line = text.splitlines()[fault.line - 1].strip()
    for function in ("", fault.function):
        if why := CANNOT_RUN.get((fault.path, function)):
            return why
    return NO_DIFFERENCE.get((fault.path, line, fault.after), "")
