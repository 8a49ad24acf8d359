"""What tests of machines played here share: jobs, machines, and a look at what is left of them."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from deepvm.runtime.backends.base import Backend, Change
from deepvm.runtime.cluster import Machine
from deepvm.runtime.run_spec import RunSpec
from tests.support.processes import gone
from tests.support.waiting import wait_until

NASTY = str(Path(__file__).with_name("stubborn_tree.py"))
PATIENCE_S = 30.0
MARK = "DEEPVM_TEST_MARK"


def machine(name: str, market: str = "spot") -> Machine:
    role: Any = name.partition("/")[0]
    of: Any = market
    return Machine(
        name=name, role=role, instance="g4dn.xlarge", market=of, usd_per_hour=0.16, on_demand_usd_per_hour=0.53
    )


def job(folder: Path, **more: Any) -> RunSpec:
    token = folder / "token"
    token.touch(mode=0o600)
    env = {MARK: secrets.token_hex(8), **more.pop("env", {})}
    return RunSpec(
        run="run-1", script="train.py", args=(), folder=folder, hub="127.0.0.1:7000", token_file=token,
        policy="every:10", env=env, **more,
    )  # fmt: skip


def python(code: str) -> Callable[[Machine], list[str]]:
    return lambda _: [sys.executable, "-I", "-S", "-c", code]


def marked(of: RunSpec) -> list[int]:
    """Processes that run with the job's environment."""
    wanted, found = f"{MARK}={of.env[MARK]}".encode(), []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if wanted in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    found.append(int(name))
            except OSError:
                continue
    return found


def runs(pid: int) -> bool:
    return not gone(pid)


def changes(backend: Backend, count: int, timeout_s: float = PATIENCE_S) -> list[Change]:
    """The next so many, in order."""
    found: list[Change] = []

    def enough() -> bool:
        found.extend(backend.poll())
        return len(found) >= count

    wait_until(enough, f"{count} changes", timeout_s=timeout_s)
    assert len(found) == count, found
    return found


def as_tuples(found: Sequence[Change]) -> list[tuple[str, str, str, int | None]]:
    return [(change.machine, change.state, change.why, change.exit_code) for change in found]
