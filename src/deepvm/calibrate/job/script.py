"""``deepvm profile -- train.py``: a script in, its Job out. ``observer`` watches it in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from deepvm import variables
from deepvm.calibrate.job.memory import memory_parts
from deepvm.calibrate.job.process import ScriptProcess
from deepvm.catalog.accelerators import find
from deepvm.errors import DeepvmError, UsageError, printable
from deepvm.performance.job import Component, Job, Origin, Parallel
from deepvm.performance.measured import Samples
from deepvm.runtime.entry import Entry, parse_entry
from deepvm.runtime.this_machine import here_and_now
from deepvm.units import format_bytes, format_seconds

DEFAULT_STEPS, DEFAULT_WARMUP, DEFAULT_TIMEOUT_S = 10, 3, 600.0
COUNTED_STEPS = 2  # at the end, in which FLOPs are counted
END_S = 15.0  # that a script has to end by itself once it is measured
LATE_S = 5.0  # until a script that does not report at its deadline is ended
SHOWN_LINES = 8
MOST_TMPDIR = 70  # characters: workers of a DataLoader make sockets below it, whose names may have 107

Progress = Callable[[int, int], None]  # steps so far, and of how many


class ScriptFailed(DeepvmError):
    """A script that could not be profiled, with the end of its output."""

    def __init__(self, message: str, output: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.output = tuple(printable(line) for line in output)


def profile_script(
    words: Sequence[str],
    *,
    steps: int = DEFAULT_STEPS,
    warmup: int = DEFAULT_WARMUP,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    parallel: Parallel | None = None,
    progress: Progress | None = None,
) -> Job:
    """Run a script for a few training steps and return what was measured. ``words`` are the script and its arguments.

    Raises ScriptFailed if it crashes, ends or does not step; UsageError if it does not exist. Nothing is left behind
    but the files that the script itself creates, which the job's notes name."""
    if steps < 1 or warmup < 0:
        raise UsageError(f"steps is {steps} and warmup {warmup}: time at least one step, after zero or more")
    if not timeout_s > 0:
        raise UsageError(f"the timeout is {timeout_s:g} s: it must be above zero")
    if parallel is not None and parallel not in get_args(Parallel):
        raise UsageError(f"parallel is {parallel!r}: it must be ddp or fsdp")
    entry = parse_entry(words)
    entry.check(os.getcwd())
    total = max(warmup, 1) + steps + COUNTED_STEPS
    with tempfile.TemporaryDirectory(prefix="deepvm-", ignore_cleanup_errors=True) as folder:
        scratch = Path(folder)
        settings = {
            "script": entry.script, "args": list(entry.args), "module": entry.module, "scratch": folder,
            "steps": steps, "warmup": max(warmup, 1), "timeout_s": timeout_s,
        }  # fmt: skip
        (scratch / "settings.json").write_text(json.dumps(settings))
        (scratch / "t").mkdir()
        command = [sys.executable, "-m", "deepvm.calibrate.job.observer", str(scratch / "settings.json")]
        process = ScriptProcess(command, env=_environment(scratch), scratch=scratch)
        try:
            report, code = _follow(process, scratch, timeout_s, total, progress or (lambda *_: None))
        finally:
            process.end()
        return _Outcome(entry, report, code, process, total, timeout_s, steps=_steps_done(scratch)).job(parallel)


def _environment(scratch: Path) -> dict[str, str]:
    """Return this process's environment, with temporary files, checkpoints and compiled modules out of the way."""
    kept = {k: v for k, v in os.environ.items() if k not in (variables.EVENTS, variables.NOTICE_FILE)}
    temporary = str(scratch / "t")
    if len(temporary) <= MOST_TMPDIR:
        kept["TMPDIR"] = temporary
    return {
        **kept,
        variables.STORE: f"file://{scratch}/store",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _follow(
    process: ScriptProcess, scratch: Path, timeout_s: float, total: int, progress: Progress
) -> tuple[dict[str, Any], int | None]:
    """Wait for the report, then for the script's end. Return the report, empty if there is none, and the exit code."""
    ends_s = time.monotonic() + timeout_s + LATE_S
    code: int | None = None
    while code is None and time.monotonic() < ends_s:
        code = process.wait(0.1)
        progress(min(_steps_done(scratch), total), total)
        if _read_report(scratch).get("outcome") not in (None, "timed"):
            code = process.wait(END_S) if code is None else code
            break
    return _read_report(scratch), code


def _steps_done(scratch: Path) -> int:
    with suppress(OSError, ValueError):
        return int((scratch / "progress").read_bytes() or b"0")
    return 0


def _read_report(scratch: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        found = json.loads((scratch / "report.json").read_text())
        return found if isinstance(found, dict) else {}
    return {}


class _Outcome:
    """What became of a script: a job, or the sentence that says why not."""

    def __init__(
        self,
        entry: Entry,
        report: Mapping[str, Any],
        code: int | None,
        process: ScriptProcess,
        total: int,
        timeout_s: float,
        *,
        steps: int,
    ) -> None:
        self._name = os.path.basename(entry.script) if not entry.module else entry.script
        self._report, self._code, self._process = report, code, process
        self._total, self._timeout_s = total, timeout_s
        self._seen: Mapping[str, Any] = report.get("seen", {"steps": steps, "text": "", "torch": False})

    def job(self, parallel: Parallel | None) -> Job:
        kind = self._report.get("outcome")
        if kind in ("done", "timed"):
            return self._job(parallel)
        problem = {
            "crashed": self._crashed,
            "exited": self._exited,
            "ended": self._ended,
            "timeout": self._timed_out,
        }.get(kind or "", self._died)()
        raise ScriptFailed(problem, self._process.lines(SHOWN_LINES))

    # --- failures -----------------------------------------------------------------------------------------------

    def _crashed(self) -> str:
        where = f" ({self._report['where']})" if self._report.get("where") else ""
        error = str(self._report.get("error", ""))
        hint = ""
        if "environment variable RANK" in error or "environment variable MASTER" in error:
            hint = ": run it with RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29501 in front"
        return f"{self._name} failed {self._when()}: {error}{where}{hint}"

    def _when(self) -> str:
        steps = self._seen.get("steps", 0)
        return f"after {steps} step{'s' if steps > 1 else ''}" if steps else "before its first step"

    def _exited(self) -> str:
        lines, code = self._process.lines(200), self._report.get("code")
        usage = next((line for line in lines if line.lower().startswith("usage:")), None)
        if code == 2 and usage is not None:
            wrong = next((line for line in reversed(lines) if "error:" in line), "")
            detail = f" ({wrong.partition('error:')[2].strip()})" if wrong else ""
            return f"{self._name} needs other arguments{detail}: write them after it; {usage}"
        said = self._report.get("said") or (lines[-1] if lines else "it printed nothing")
        return f"{self._name} exited with code {code} {self._when()}: {said}"

    def _ended(self) -> str:
        steps = self._seen.get("steps", 0)
        if steps:
            return (
                f"{self._name} ended after {steps} steps, profiling needs {self._total}: let it train longer, or lower "
                "--steps or --warmup"
            )
        if not self._seen.get("torch"):
            return f"{self._name} ended without importing torch: profile a script that trains with PyTorch"
        optimizers = self._seen.get("optimizers") or []
        if optimizers:
            return f"{self._name} ended without a step: its optimizer ({', '.join(optimizers)}) never stepped"
        return (
            f"{self._name} ended without an optimizer ({self._seen.get('text')}): profile a script that trains with "
            "torch.optim in its own process"
        )

    def _timed_out(self) -> str:
        limit, where = format_seconds(self._timeout_s), self._report.get("where")
        at = f"; it was at {where}" if where else ""
        loud = f"; it printed {format_bytes(self._process.printed_bytes)}" if self._process.printed_bytes > 1e6 else ""
        steps = self._seen.get("steps", 0)
        seen = f"{self._seen.get('text')}"
        if steps:
            return f"{self._name} made {steps} of {self._total} steps in {limit}{at}: raise --timeout, or lower --steps"
        optimizers = self._seen.get("optimizers") or []
        made = f", made {', '.join(optimizers)}" if optimizers else ""
        return f"{self._name} made no training step in {limit} (seen: {seen}{made}{at}{loud}): raise --timeout"

    def _died(self) -> str:
        if self._code is None:
            return f"{self._name} did not respond within {format_seconds(self._timeout_s)}, and was ended"
        if self._code < 0:
            name = signal.Signals(-self._code).name
            memory = ", perhaps for want of memory" if self._code == -signal.SIGKILL else ""
            return f"{self._name} was ended by {name} {self._when()}{memory}"
        last = [*self._process.lines(1), "it printed nothing"][0]
        return f"{self._name} exited with code {self._code} {self._when()}: {last}"

    # --- the job ------------------------------------------------------------------------------------------------

    def _job(self, parallel: Parallel | None) -> Job:
        found = self._report
        parallel = parallel or ("fsdp" if found["fsdp"] else "ddp")
        components = {
            str(name)[:200]: Component(bytes=size, changed_bytes=changed)
            for name, (size, changed) in found["components"].items()
        }
        peak = found["device_peak_bytes"]
        parts = memory_parts(
            weights=found["weight_bytes"], gradients=found["gradient_bytes"], optimizer=found["optimizer_bytes"],
            activations=found.get("activation_bytes", 0), parallel=parallel, peak_bytes=peak,
        )  # fmt: skip
        sizes: Origin = "measured" if found["savable"] else "computed"
        origins: dict[str, Origin] = {
            "components": sizes, "gradient_bytes": "measured", "batch": "measured", "step_s": "measured",
            "data_share": "measured", "flops_per_step": "measured", "traffic_bytes_per_step": "computed",
            "memory_bytes": _memory_origin(peak is not None, "activation_bytes" in found),
            "host_memory_bytes": "measured",
        }  # fmt: skip
        accelerator = find(found["accelerator"]) if found["accelerator"] else None
        name = accelerator.name if accelerator else found["accelerator"]
        now = here_and_now()
        now = replace(
            now,
            machine=replace(now.machine, accelerator=name, accelerator_count=1 if name else 0),
            versions={**now.versions, "torch": found["torch"], "threads": str(found["threads"])},
        )
        job = Job(
            name=self._name[:200],
            parameters=found["parameters"],
            trainable_parameters=found["trainable_parameters"],
            components=components,
            gradient_bytes=found["gradient_bytes"],
            batch=found["batch"] or None,
            step_s=Samples(tuple(found["step_s"])),
            data_share=found["data_share"],
            flops_per_step=found.get("flops_per_step"),
            traffic_bytes_per_step=found.get("traffic_bytes_per_step"),
            memory_bytes=sum(parts.values()),
            memory_parts=parts,
            host_memory_bytes=found["host_memory_bytes"],
            precision=found["precision"],
            parallel=parallel,
            provenance=now,
            notes=tuple(self._notes()),
        )
        known = {figure: origin for figure, origin in origins.items() if getattr(job, figure) is not None}
        return _with_origins(job, known)

    def _notes(self) -> list[str]:
        notes = []
        if not self._report["savable"]:
            notes.append(f"a Checkpointer cannot save this state as it is: {self._report.get('why')}")
        if self._report.get("outcome") == "timed":
            then = self._report.get("then", {})
            why = then.get("error") or "the script ended, or ran out of time, meanwhile"
            notes.append(f"FLOPs and activations could not be counted, and its GPU memory is without these: {why}")
        files = [name for name in self._report.get("new_files", []) if os.path.exists(name)]
        if files:
            more = f" and {len(files) - 5} more" if len(files) > 5 else ""
            notes.append(f"the script itself created {', '.join(files[:5])}{more}")
        return [printable(note).replace("\n", " ")[:2000] for note in notes]


def _memory_origin(measured: bool, counted: bool) -> Origin:
    return "measured" if measured else "computed" if counted else "guessed"


def _with_origins(job: Job, origins: Mapping[str, Origin]) -> Job:
    from dataclasses import replace

    return replace(job, origins=dict(origins))
