"""Sizes in; for each, ``deepvm run`` of a small job that loses a worker several times; overheads out of its profile.

The run is the real one, of two workers and a memory node that writes to the disk, in a folder that is removed."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepvm.calibrate.network.settings import free_memory_bytes
from deepvm.calibrate.overheads.settings import WORKERS, OverheadSettings
from deepvm.calibrate.profile_file import ProfileFile
from deepvm.calibrate.scratch import scratch_folder
from deepvm.errors import DeepvmError
from deepvm.performance.profile import OVERHEADS, OverheadPoint, Profile, read_profile
from deepvm.runtime.backends.local.process_tree import ProcessTree
from deepvm.runtime.log_tail import tail_text
from deepvm.units import format_bytes

BETWEEN = 8  # steps from one preemption to the next
SAVE_EVERY = 2  # steps
RUN_S = 3600.0
STOP_S = 10.0
POLL_S = 0.05
_SCRIPT = Path(__file__).with_name("training.py")
Progress = Callable[[str, int, int], None]  # what is measured now, sizes done, all sizes


@dataclass(frozen=True, kw_only=True, slots=True)
class OverheadCalibration:
    """The profile, and the points of the sizes that were asked for, in the order of OVERHEADS."""

    profile: Profile
    points: tuple[OverheadPoint, ...]
    kept: int  # sizes that were in the file already

    def to_json(self) -> dict[str, Any]:
        return {
            "points": [point.to_json() for point in self.points],
            "kept": self.kept,
            "provenance": self.profile.provenance.to_json(),
        }


def calibrate_overheads(
    settings: OverheadSettings, output: Path | None = None, *, progress: Progress = lambda *_: None
) -> OverheadCalibration:
    """Measure the sizes that ``output`` lacks, and write each there as soon as it is measured."""
    settings.check_memory(free_memory_bytes())
    file = ProfileFile.open(output)
    known = {point.state_bytes for point in file.profile.overheads}
    missing = [size for size in settings.sizes if size not in known]
    for done, size in enumerate(missing):
        progress(f"a state of {format_bytes(size)}", len(settings.sizes) - len(missing) + done, len(settings.sizes))
        file.add(*_measure(size, settings), notes=[f"overheads: {WORKERS} workers and a memory node on one host"])
    progress("done", len(settings.sizes), len(settings.sizes))
    order = {name: place for place, name in enumerate(OVERHEADS)}
    points = [point for point in file.profile.overheads if point.state_bytes in settings.sizes]
    return OverheadCalibration(
        profile=file.profile,
        points=tuple(sorted(points, key=lambda p: (order[p.name], p.state_bytes))),
        kept=len(settings.sizes) - len(missing),
    )


def _measure(size: int, settings: OverheadSettings) -> list[OverheadPoint]:
    """Run the job of one size, and return its overheads. A save has a few bytes more than the state: its header."""
    import platformdirs

    with scratch_folder(platformdirs.user_cache_path("deepvm") / "calibrate") as scratch:  # on a disk, unlike /tmp
        profile = _run(size, settings, scratch)
    points = [replace(point, state_bytes=size) for point in profile.overheads]
    joined: dict[str, OverheadPoint] = {}
    for point in points:  # the header's size may differ by some bytes from save to save
        before = joined.get(point.name)
        seconds = point.seconds.seconds if before is None else (*before.seconds.seconds, *point.seconds.seconds)
        joined[point.name] = replace(point, seconds=type(point.seconds)(seconds))
    lacking = [name for name in OVERHEADS if name not in joined]
    if lacking:
        raise DeepvmError(
            f"the run of {format_bytes(size)} measured no {', '.join(lacking)}: try again on a less busy machine"
        )
    return list(joined.values())


def _run(size: int, settings: OverheadSettings, scratch: Path) -> Profile:
    plan, name = scratch / "plan.json", "overheads"
    _write_plan(plan, size)
    faults = [f"at:step:{BETWEEN * number}:worker/1:notice=0s" for number in range(1, settings.repeats + 1)]
    script = [str(_SCRIPT), str(size), str(settings.repeats), str(BETWEEN), str(scratch / "starts")]
    words = ["run", str(plan), "--name", name, "--workers", str(WORKERS), "--save", f"every {SAVE_EVERY} steps"]
    words += ["--memory", str(settings.memory_node_bytes(size)), "--preempt", ",".join(faults), "--json"]
    env = {key: value for key, value in os.environ.items() if not key.startswith("DEEPVM_")}
    env |= {"DEEPVM_RUNS": str(scratch / "runs"), "OMP_NUM_THREADS": "1"}
    log = scratch / "run.log"
    tree = ProcessTree([sys.executable, "-m", "deepvm", *words, "--", *script], env=env, log=log)
    deadline_s = time.monotonic() + RUN_S
    try:
        while (code := tree.poll()) is None:
            if time.monotonic() > deadline_s:
                raise DeepvmError(
                    f"the run of {format_bytes(size)} did not end within {RUN_S:.0f} s: give smaller --sizes"
                )
            time.sleep(POLL_S)
    finally:
        tree.kill()
        tree.wait(timeout_s=STOP_S)
    if code != 0:
        why = _last_line(tail_text(log, most_bytes=4000))
        raise DeepvmError(f"the run of {format_bytes(size)} failed (exit code {code}){': ' + why if why else ''}")
    return read_profile(scratch / "runs" / name / "profile.json")


def _last_line(text: str) -> str:
    return next((line.strip()[:300] for line in reversed(text.splitlines()) if line.strip()), "")


def _write_plan(path: Path, size: int) -> None:
    """Write a plan of spot workers and an on-demand memory node; this host plays them."""
    from deepvm import catalog as catalogues
    from deepvm.plan import Request, plan

    found = plan(
        catalogues.load("paper-aws-2023"),
        Request(budget_usd=3.0, top=1, checkpoint_bytes=size, architectures=("tiering",)),
    )
    path.write_text(json.dumps(found.to_json()), encoding="utf-8")
