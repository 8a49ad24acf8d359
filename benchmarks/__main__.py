"""``python -m benchmarks [NAME ...]``: run benchmarks, write benchmarks/results/NAME.md, NAME.json and the summary.

Exit code 1 if a target was missed; the results are written all the same. With ``--quick`` the table is printed and
nothing is written. ``python -m benchmarks summary`` writes the summary alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

from benchmarks import Measurement, Options, Result, Table, display, summary
from benchmarks.calibration import benchmark as calibration
from benchmarks.checkpoint import benchmark as checkpoint
from benchmarks.checkpoint import sharing
from benchmarks.curves import benchmark as curves
from benchmarks.market import benchmark as market
from benchmarks.planner import benchmark as planner
from benchmarks.recovery import agreement
from benchmarks.recovery import benchmark as recovery
from benchmarks.restore import benchmark as restore
from benchmarks.risk import benchmark as risk
from benchmarks.training import benchmark as training
from benchmarks.transfer import benchmark as transfer
from benchmarks.transfer import flows

RESULTS = summary.RESULTS
BENCHMARKS: dict[str, Callable[[Options], Result]] = {
    "planner": lambda _: planner.run(),
    "risk": risk.run,
    "checkpoint": checkpoint.run,
    "training": training.run,
    "flows": flows.run,
    "restore": restore.run,
    "transfer": transfer.run,
    "sharing": sharing.run,
    "recovery": recovery.run,
    "agreement": agreement.run,
    "curves": curves.run,
    "calibration": calibration.run,
    "market": market.run,
}
PACKAGES = ("deepvm", "numpy", "scipy", "typer", "rich", "torch", "safetensors", "xxhash")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join([*BENCHMARKS, "summary"]))
    parser.add_argument("--quick", action="store_true", help="few repeats; print the table and write nothing")
    parser.add_argument("--rounds", type=int, help="repeats, where a benchmark has rounds")
    parser.add_argument("--no-peers", action="store_true", help="leave out peers that need environments of their own")
    parser.add_argument("--only", action="append", default=[], help="a workload of the benchmark; may be repeated")
    parser.add_argument(
        "--traces", type=Path, help="recorded spot markets, for market and risk; without it, drawn ones"
    )
    parser.add_argument("--meaning", choices=("up", "preempted"), default="up", help="what the traces count")
    parser.add_argument("--share", type=float, default=0.5, help="of each trace that is history, for market")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers, nodes and namespaces are cleaned up
    options = Options(
        quick=given.quick, rounds=given.rounds, peers=not given.no_peers, only=given.only, traces=given.traces,
        meaning=given.meaning, share=given.share,
    )  # fmt: skip
    if given.names == ["summary"]:
        print(f"written to {summary.write()}", file=sys.stderr)
        return 0
    unknown = [name for name in given.names if name not in BENCHMARKS]
    if unknown:
        print(f"no benchmark is called {unknown[0]!r}: known are {', '.join(BENCHMARKS)} and summary", file=sys.stderr)
        return 2
    missed = 0
    for name in given.names or list(BENCHMARKS):
        around = environment(name, arguments)
        result = BENCHMARKS[name](options)
        missed += sum(m.met is False for m in result.measurements)
        if options.quick:
            print(markdown(result, around))
        else:
            write(name, result, around)
            print(f"written to {RESULTS / name}.md", file=sys.stderr)
    return 1 if missed else 0


def environment(name: str, arguments: list[str]) -> dict[str, str]:
    """What a result has to carry: command, versions, machine, date."""
    busy = os.getloadavg()[0]
    flags = [argument.split("/")[-1] for argument in arguments if argument not in BENCHMARKS]  # no paths of a machine
    return {
        "command": " ".join(["python -m benchmarks", name, *flags]),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "versions": ", ".join([f"Python {platform.python_version()}", *(f"{p} {version(p)}" for p in PACKAGES)]),
        "machine": f"{_cpu()}, {os.cpu_count()} cores, {_memory_gib():.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "load at the start": f"{busy:.2f} processes",
    }


def write(name: str, result: Result, around: dict[str, str]) -> None:
    RESULTS.mkdir(exist_ok=True)
    document = {
        "name": name,
        "environment": around,
        "seed": result.seed,
        "measurements": [m.to_json() for m in result.measurements],
        **({"tables": [asdict(table) for table in result.tables]} if result.tables else {}),
        "notes": list(result.notes),
        **({"samples": result.samples} if result.samples else {}),
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    (RESULTS / f"{name}.md").write_text(markdown(result, around), encoding="utf-8")
    summary.write()


def markdown(result: Result, around: dict[str, str]) -> str:
    lines = [f"# {result.title}", "", result.about, "", *(f"- {key}: {value}" for key, value in around.items())]
    lines += [
        f"- seed: {result.seed}",
        "",
        "| what | median | quartiles | runs | target | met |",
        "|---|--:|--:|--:|--:|---|",
    ]
    lines += [_row(m) for m in result.measurements]
    for table in result.tables:
        lines += ["", *_table(table)]
    lines += ["", *(f"- {note}" for note in result.notes)]
    return "\n".join(lines).rstrip() + "\n"


def _table(table: Table) -> list[str]:
    rule = ["---", *["--:"] * (len(table.columns) - 1)]
    return [f"## {table.title}", "", *(f"| {' | '.join(row)} |" for row in (table.columns, rule, *table.rows))]


def _row(m: Measurement) -> str:
    figures = m.to_json()
    met = "" if m.met is None else ("yes" if m.met else "**no**")
    what = f"{m.what} ({m.note})" if m.note else m.what
    return (
        f"| {what} | {display.value(m.median, m.unit)} | {display.quartiles(figures)} | {m.runs} "
        f"| {display.target(figures)} | {met} |"
    )


def _commit() -> str:
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found.stdout.strip()


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
