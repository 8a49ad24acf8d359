"""Hosts that ssh reaches -> what they are, and the command that starts a rank on each: one worker for a host.

Each host needs Python with deepvm and torch, and an address that the others reach: the one that ssh arrived at is used.
A rank ends when its ssh connection does.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from deepvm import strict_json as strict
from deepvm.calibrate.profile_file import identity
from deepvm.errors import DeepvmError, UsageError, printable
from deepvm.performance.measured import Provenance

PREFIX = "ssh:"
PYTHON = "python3"
MOST_HOSTS = 1000
ANSWER_S = 120.0  # torch is imported, perhaps from a slow disk
MOST_BYTES = 100_000  # of an answer
_NO_CONNECTION = 255  # the exit code of ssh, whose error says what is wrong
_SSH = (
    "ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5",
    "-o", "ServerAliveCountMax=3",
)  # fmt: skip
_WORKER = ("-m", "deepvm.calibrate.scaling.worker")
_SAME = ("deepvm", "torch")  # versions


def parse_hosts(text: str) -> tuple[str, ...]:
    """Parse ``ssh:h1,ubuntu@h2,ssh://h3:2222``, the value of --on; nothing for ``local``."""
    if text == "local":
        return ()
    names = tuple(name.strip() for name in text.removeprefix(PREFIX).split(","))
    if not text.startswith(PREFIX):
        raise UsageError(f"--on {text[:80]} is unknown: write --on local, or --on ssh:HOST,HOST")
    for name in names:
        if not re.fullmatch(r"(ssh://)?[A-Za-z0-9_][A-Za-z0-9_.@:%\[\]-]*", name):
            raise UsageError(f"--on has the host {name[:80]!r}: write it like --on ssh:10.0.0.1,ubuntu@gpu2")
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise UsageError(f"--on names {doubled[0]} twice: each host runs one worker")
    if len(names) > MOST_HOSTS:
        raise UsageError(f"--on names {len(names)} hosts: at most {MOST_HOSTS}")
    return names


@dataclass(frozen=True, kw_only=True, slots=True)
class Hosts:
    """Machines of one kind, each of which runs one rank."""

    names: tuple[str, ...]
    python: str
    provenance: Provenance  # of the first one, as it trains
    device: str

    def command(self, rank: int, task: Mapping[str, Any]) -> list[str]:
        return [*_SSH, self.names[rank], shlex.join([self.python, *_WORKER, json.dumps(task)])]


def examine(names: Sequence[str], *, python: str, device: str) -> Hosts:
    """Ask all hosts what they are. DeepvmError if one does not answer, UsageError if they are not of one kind."""
    with ThreadPoolExecutor(max_workers=min(32, len(names))) as pool:
        found = list(pool.map(lambda name: _ask(name, python, device), names))
    first, kind = found[0]
    for name, (other, other_kind) in zip(names, found, strict=True):
        machine = other.machine
        if machine.accelerator_count > 1:
            raise UsageError(f"{name} has {machine.accelerator_count} GPUs: --on ssh: measures hosts with one GPU each")
        if identity(machine) != identity(first.machine) or kind != other_kind:
            raise UsageError(
                f"{name} is another machine ({machine.cpu}, {machine.title}) than {names[0]} ({first.machine.cpu}, "
                f"{first.machine.title}): a curve is of one kind of machine"
            )
        for package in _SAME:
            if other.versions.get(package) != first.versions.get(package):
                raise UsageError(
                    f"{name} has {package} {other.versions.get(package)}, {names[0]} has "
                    f"{first.versions.get(package)}: install the same on all hosts"
                )
    return Hosts(names=tuple(names), python=python, provenance=first, device=kind)


def _ask(name: str, python: str, device: str) -> tuple[Provenance, str]:
    question = json.dumps({"about": True, "device": device})
    command = [*_SSH, name, shlex.join([python, *_WORKER, question])]
    try:
        asked = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=ANSWER_S)
    except FileNotFoundError:
        raise UsageError("--on ssh: needs the ssh command: install openssh-client") from None
    except subprocess.TimeoutExpired:
        raise DeepvmError(f"{name} did not answer within {ANSWER_S:g} s: try ssh {name}") from None
    if asked.returncode:
        lines = [line for line in asked.stderr.decode(errors="replace").splitlines() if line.strip()]
        said = printable(lines[-1])[:300] if lines else f"exit code {asked.returncode}"
        _, ours, message = said.partition("UsageError: ")
        hint = f": install deepvm[train] there, or name its Python with --remote-python (it is {python})"
        known = ours or asked.returncode == _NO_CONNECTION
        raise DeepvmError(f"{name} cannot run a worker: {message if ours else said}{'' if known else hint}")
    try:
        answer = strict.loads((asked.stdout.splitlines() or [b""])[-1], most_bytes=MOST_BYTES)
        row = strict.table(answer, "the answer")
        kind = strict.text(strict.member(row, "device"), "device", 10)
        return Provenance.from_json(strict.member(row, "provenance")), kind
    except strict.MalformedJson as error:
        raise DeepvmError(f"{name} did not answer as a worker does: {error}") from None
