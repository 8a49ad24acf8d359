"""What tests of machines played here share: jobs, machines, and a look at what is left of them."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from deepvm.runtime.backends.base import Backend, Change
from deepvm.runtime.cluster import Machine
from deepvm.runtime.run_spec import RunSpec

NASTY = str(Path(__file__).with_name("nasty.py"))
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
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def wait_until(ready: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := ready()):
        assert time.monotonic() < deadline, f"{what} did not happen in {timeout_s:g} s"
        time.sleep(0.002)
    return found


def changes(backend: Backend, count: int, timeout_s: float = PATIENCE_S) -> list[Change]:
    """The next so many, in order."""
    found: list[Change] = []

    def enough() -> bool:
        found.extend(backend.poll())
        return len(found) >= count

    wait_until(enough, f"{count} changes", timeout_s)
    assert len(found) == count, found
    return found


def told(found: Sequence[Change]) -> list[tuple[str, str, str, int | None]]:
    return [(change.machine, change.state, change.why, change.exit_code) for change in found]
