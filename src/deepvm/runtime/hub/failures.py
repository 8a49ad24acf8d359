"""Output of failed workers -> the error to show, and whether to restart them. Pure."""

from __future__ import annotations

import re
import signal

from deepvm.runtime.log_tail import script_output

MOST_LINES = 40  # of a traceback that is shown
_RANK = re.compile(r"^\[rank\d+\]:? ?")  # torch's own prefix
_TRACEBACK = "Traceback (most recent call last):"
_CHAIN = ("During handling of the above exception", "The above exception was the direct cause")
_RAISED = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt|Warning)\b")
_USAGE = re.compile(r"^\S+: error: ")  # argparse
# Raised while a script is parsed or its imports run: a restart would fail again.
_HOPELESS = ("SyntaxError", "IndentationError", "TabError", "ImportError", "ModuleNotFoundError")


def error_text(output: str) -> str:
    """Return the traceback in the output of failed workers, or its last lines."""
    lines = [line for each in output.splitlines() if (line := _RANK.sub("", script_output(each))).strip()]
    begins = [at for at, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    if not begins:
        return "\n".join(lines[-MOST_LINES:])
    at = begins[-1]
    while at > 0 and len(begins) > 1 and lines[at - 1].startswith(_CHAIN):
        begins.pop()
        at = begins[-1]
    found = lines[at:]
    if len(found) > MOST_LINES:
        found = [found[0], f"  ... {len(found) - MOST_LINES} lines ...", *found[-MOST_LINES:]]
    return "\n".join(found)


def error_line(output: str) -> str:
    """Return the line that names the error: ``ModuleNotFoundError: No module named 'x'``; empty if there is none."""
    lines = error_text(output).splitlines()
    begins = max((at for at, line in enumerate(lines) if line.startswith(_TRACEBACK)), default=None)
    if begins is not None:
        return next((line[:300] for line in lines[begins + 1 :] if not line[0].isspace()), "")
    return next((line[:300] for line in reversed(lines) if _RAISED.match(line) or _USAGE.match(line)), "")


def ended_by(code: int) -> str:
    """Return how a process ended, by its exit code; empty for code 0."""
    if code >= 0:
        return f"exit code {code}" if code else ""
    try:
        return f"ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"ended by signal {-code}"


class Restarts:
    """Counts the failures of a run's workers, and decides when a restart is pointless."""

    def __init__(self, most: int) -> None:
        self._most, self._times = most, 0
        self._last_line: str | None = None

    def refuse(self, output: str, *, stepped: bool, code: int = 0) -> str | None:
        """Return why failed workers with this output are not restarted; None if they are. ``stepped``: they had
        finished a step since their start; ``code``: the first one's exit code."""
        self._times += 1
        line = error_line(output) or ended_by(max(code, 0))  # a signal may come from outside, and not again
        before, self._last_line = self._last_line, None if stepped else line
        if not stepped and line and (line.startswith(_HOPELESS) or _USAGE.match(line)):
            return f"failed before the first step, as they would again: {line}"
        if not stepped and line and line == before:
            return f"failed twice in the same way before the first step: {line}"
        if self._times > self._most:
            return f"failed after {self._most} restarts" if self._most else "failed"
        return None
