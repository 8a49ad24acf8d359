"""The text of ``--preempt`` -> faults: which machines to preempt, and when. Pure but for reading a trace.

| written | what is preempted |
|---|---|
| ``at:20s:worker/2`` | that machine, 20 s after training began |
| ``at:step:50:worker/1+worker/2`` | both, when step 50 is done |
| ``at:20s:worker/*`` | all workers on spot at once; ``*``: all machines on spot |
| ``poisson:3/h`` | each machine on spot three times an hour, at random times |
| ``trace:FILE`` | the machines in a file: lines of ``seconds,machine[,notice_s]``, or JSON objects with these names |

Rules are separated by commas. ``:notice=5s`` at the end of a rule is for that rule, ``notice=5s`` alone for all others.
"""

from __future__ import annotations

import csv
import heapq
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepvm import strict_json as strict
from deepvm.errors import MalformedFile, UnknownName, UsageError
from deepvm.runtime.cluster import Machine
from deepvm.units import parse_seconds

DEFAULT_NOTICE_S = 2.0  # AWS gives 120 s to jobs of hours; local runs take minutes
_EXAMPLES = "at:20s:worker/2, at:step:50:worker/2, poisson:3/h or trace:FILE"
_PER_S = {"s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_COLUMNS = ("seconds", "machine", "notice_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Machines that are preempted together: at a time since training began, or after a step."""

    at_s: float | None
    machines: tuple[str, ...]
    notice_s: float
    at_step: int | None = None

    def __post_init__(self) -> None:
        if (self.at_s is None) == (self.at_step is None):
            raise UsageError("a fault happens either at a time or at a step")


class Faults:
    """Each fault is due once."""

    def __init__(self, timed: Iterator[Fault], at_steps: Sequence[Fault]) -> None:
        """``timed`` are ordered by time, and may be endless."""
        self._timed, self._at_steps = timed, sorted(at_steps, key=lambda fault: fault.at_step or 0)
        self._next = next(timed, None)

    def due(self, now_s: float, *, step: int = 0) -> list[Fault]:
        """Return the faults due since the last call, earliest first; ``step`` is the last finished one."""
        found = []
        while self._next is not None and self._next.at_s is not None and self._next.at_s <= now_s:
            found.append(self._next)
            self._next = next(self._timed, None)
        while self._at_steps and (self._at_steps[0].at_step or 0) <= step:
            found.append(self._at_steps.pop(0))
        return found


def parse_faults(text: str, machines: Sequence[Machine], seed: int) -> Faults:
    """Read ``--preempt``. One seed always gives the same machines and times."""
    rules, notice_s = [], DEFAULT_NOTICE_S
    for rule in (part.strip() for part in text.split(",")):
        if rule.startswith("notice="):
            notice_s = _named(rule, parse_seconds, rule.removeprefix("notice="))
        elif rule:
            rules.append(rule)
    if not rules:
        raise UsageError(f"--preempt {text!r} names no machines: write {_EXAMPLES}")
    streams: list[Iterator[Fault]] = []
    at_steps: list[Fault] = []
    for number, rule in enumerate(rules):
        found = _named(rule, _parse_rule, rule, machines, f"{seed} {number}", notice_s)
        if isinstance(found, Fault) and found.at_step is not None:
            at_steps.append(found)
        else:
            streams.append(iter([found]) if isinstance(found, Fault) else found)
    return Faults(heapq.merge(*streams, key=_time_s), at_steps)


def _time_s(fault: Fault) -> float:
    return fault.at_s or 0.0


def _named(rule: str, parse: Any, *args: Any) -> Any:
    """Call a parser, and add the rule to its errors; errors in a trace have file and line."""
    try:
        return parse(*args)
    except MalformedFile:
        raise
    except UsageError as error:
        raise UsageError(f"--preempt {rule!r}: {error}") from None


def _parse_rule(rule: str, machines: Sequence[Machine], seed: str, notice_s: float) -> Fault | Iterator[Fault]:
    body, suffix, own_notice = rule.rpartition(":notice=")
    if suffix:
        rule, notice_s = body, parse_seconds(own_notice)
    kind, _, rest = rule.partition(":")
    if kind == "at":
        when, _, target = rest.partition(":")
        if when == "step":
            number, _, target = target.partition(":")
            return Fault(at_s=None, at_step=_step(number), machines=_targets(target, machines), notice_s=notice_s)
        return Fault(at_s=parse_seconds(when), machines=_targets(target, machines), notice_s=notice_s)
    if kind == "poisson":
        gap_s, spot = _mean_gap_s(rest), _on_spot(machines)
        return heapq.merge(*(_random_faults(name, gap_s, f"{seed} {name}", notice_s) for name in spot), key=_time_s)
    if kind == "trace":
        return iter(_read_trace(Path(rest), machines, notice_s))
    raise UsageError(f"unknown fault: write {_EXAMPLES}")


def _step(text: str) -> int:
    try:
        step = int(text)
    except ValueError:
        step = 0
    if step < 1:
        raise UsageError(f"{text!r} is not a valid step: write it like at:step:50:worker/1")
    return step


def _targets(text: str, machines: Sequence[Machine]) -> tuple[str, ...]:
    if not text:
        raise UsageError("the machine is missing: write it like at:20s:worker/2")
    found: dict[str, None] = {}
    for word in text.split("+"):
        if word == "*" or word.endswith("/*"):
            chosen = [name for name in _on_spot(machines) if name.startswith(word[:-1])]
            if not chosen:
                raise UsageError(f"no machine on spot matches {word}: write the full name of one that is not on spot")
            found |= dict.fromkeys(chosen)
        else:
            found[_known(word, machines).name] = None
    return tuple(found)


def _known(name: str, machines: Sequence[Machine]) -> Machine:
    by_name = {machine.name: machine for machine in machines}
    if name not in by_name:
        raise UnknownName("machine", name, by_name)
    return by_name[name]


def _on_spot(machines: Sequence[Machine]) -> list[str]:
    names = [machine.name for machine in machines if machine.market == "spot"]
    if not names:
        raise UsageError("no machine of this plan is on spot: write a full name, like at:20s:anchor/0")
    return names


def _mean_gap_s(rate: str) -> float:
    count, _, unit = rate.partition("/")
    try:
        per_s = float(count) / _PER_S[unit]
    except (ValueError, KeyError):
        per_s = math.nan
    if not 0 < per_s <= 1:
        raise UsageError(f"{rate!r} is not a valid rate: write it like 3/h, in s, min, h or d, at most 1/s")
    return 1 / per_s


def _random_faults(name: str, mean_gap_s: float, seed: str, notice_s: float) -> Iterator[Fault]:
    generator = random.Random(seed)  # noqa: S311 - not for secrets
    at_s = 0.0
    while True:
        at_s += generator.expovariate(1 / mean_gap_s)
        yield Fault(at_s=at_s, machines=(name,), notice_s=notice_s)


def _read_trace(path: Path, machines: Sequence[Machine], notice_s: float) -> list[Fault]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise MalformedFile(path, f"it cannot be read: {getattr(error, 'strerror', None) or error}") from None
    found = []
    for number, line in enumerate(lines, start=1):
        fields = line.strip()
        if not fields or fields.startswith("#") or fields.replace(" ", "").startswith("seconds,machine"):
            continue
        try:
            found.append(_trace_line(fields, machines, notice_s))
        except UsageError as error:
            raise MalformedFile(path, str(error), line=number) from None
    if not found:
        raise MalformedFile(path, "it has no line of seconds,machine[,notice_s]")
    return sorted(found, key=_time_s)


def _trace_line(line: str, machines: Sequence[Machine], notice_s: float) -> Fault:
    row = _fields(line)
    if not {"seconds", "machine"} <= row.keys() <= set(_COLUMNS):
        raise UsageError(f"{line[:80]!r} is not seconds,machine[,notice_s]")
    machine = _known(str(row["machine"]).strip(), machines)
    if machine.market != "spot":
        raise UsageError(f"{machine.name} is not on spot: preempt it with at: instead")
    notice = row.get("notice_s")
    return Fault(
        at_s=parse_seconds(row["seconds"]),
        machines=(machine.name,),
        notice_s=notice_s if notice in (None, "") else parse_seconds(notice),
    )


def _fields(line: str) -> dict[str, Any]:
    if line.startswith("{"):
        try:
            return strict.table(strict.loads(line, most_bytes=2**16), "a fault")
        except strict.MalformedJson as error:
            raise UsageError(f"{strict.brief(line)}: {error}") from None
    try:
        cells = next(csv.reader([line]))
    except csv.Error as error:
        raise UsageError(f"not valid CSV ({error})") from None
    return dict(zip(_COLUMNS, cells, strict=False)) if len(cells) <= len(_COLUMNS) else {}
