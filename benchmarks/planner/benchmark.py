"""The planner: the paper's sweep against the same search as nested loops, and plans over all of AWS, or as much."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import Measurement, Result, measurement, seconds
from benchmarks.planner import awslike
from deepvm.catalog import Catalog, library
from deepvm.catalog.update import import_file
from deepvm.paper import published, reference
from deepvm.plan import POLICIES, Request, budgets, plan, sweep

SEED = 7
SAMPLE_USD = (0.5, 2.5, 5.0, 7.5, 10.0)  # spread over the sweep; without pruning a budget's time is nearly constant
BIG = "awslike"
SWEEP = ("sweep", "--catalog", "paper-virtual", "--checkpoint-size", "500MB", "--buffers", "2", "--json")
DEADLINE_S = 300


def run() -> Result:
    with tempfile.TemporaryDirectory() as home:
        os.environ["DEEPVM_HOME"] = home  # nobody's own catalogues are touched
        try:
            small = [*_loops(), _command("deepvm " + " ".join(SWEEP), SWEEP, below=1.0)]
            big, notes = _big(Path(home))
        finally:
            del os.environ["DEEPVM_HOME"]
    return Result(
        title="The planner",
        about=(
            "The paper's sweep in process and as a command, beside the published method as nested loops in the same "
            "run; then plans over a generated catalogue as large as the whole of AWS."
        ),
        seed=SEED,
        measurements=[*small, *big],
        notes=[
            f"The loops run unpruned, as published, at {len(SAMPLE_USD)} of the 101 budgets "
            f"({', '.join(f'${usd:g}' for usd in SAMPLE_USD)}), all four policies each, with sweeps of "
            "ours after each; their total is the time of one budget × 101, and its quartiles are the sample's.",
            *notes,
        ],
    )


def _loops() -> list[Measurement]:
    """The loops at a budget and our whole sweep in turn, so that both meet the same machine."""
    catalog = library.load("paper-virtual")
    at_usd = budgets(*reference.SWEEP_USD)
    request = Request(
        budget_usd=0.0, objective="flopp", checkpoint_bytes=reference.SWEEP_CHECKPOINT_BYTES, buffers=reference.BUFFERS
    )
    setting = published.setting_of(
        catalog, checkpoint_bytes=reference.SWEEP_CHECKPOINT_BYTES, buffers=reference.BUFFERS
    )
    points = {(p.policy, p.budget_usd): p for p in sweep(catalog, request, at_usd)}
    ours, loops, scaled = [], [], []
    for usd in SAMPLE_USD:
        start = time.perf_counter()
        found = {policy: published.recommend(setting, usd, policy) for policy in POLICIES}
        loops.append(time.perf_counter() - start)
        for policy, choices in found.items():  # a fast wrong answer would be no answer
            point = points[policy, usd]
            assert [(c.instance, c.count) for c in choices] == [(point.instance, point.count)]
        ours += seconds(lambda: sweep(catalog, request, at_usd), runs=5)
        scaled.append(loops[-1] * len(at_usd))
    median_s = measurement("", ours).median
    return [
        measurement("sweep in process, 101 budgets × 4 policies", ours),
        measurement("nested loops, one budget × 4 policies", loops),
        measurement("nested loops, 101 budgets × 4 policies, scaled", scaled),
        measurement("loops over sweep", [s / median_s for s in scaled], unit="times", at_least=500),
    ]


def _big(home: Path) -> tuple[list[Measurement], list[str]]:
    csv_path = home / "vms.csv"
    rows = awslike.write(csv_path, seed=SEED)
    update = import_file(csv_path, provider="aws", name=BIG)
    assert update.report is not None
    found = [
        measurement(
            f"import of {rows:,} rows, in process",
            seconds(lambda: import_file(csv_path, provider="aws", name=BIG), runs=5, warm_up=False),
            below=2.0,
            note="replaces and compares with the one before",
        ),
        _command("deepvm catalog import", ("catalog", "import", str(csv_path), "--name", "other", "--json"), runs=5),
        measurement("load of that catalogue, in process", seconds(lambda: library.load(BIG), runs=9), below=0.15),
    ]
    catalog = library.load(BIG)
    for usd in (3.0, 30.0):
        found.append(
            measurement(
                f"plan at ${usd:g}/h, tiering and single-anchor, in process",
                seconds(lambda usd=usd: plan(catalog, Request(budget_usd=usd)), runs=9),  # type: ignore[misc]
                below=0.2,
            )
        )
    by_table = Request(budget_usd=30.0, saturation="table")
    found.append(
        measurement(
            "the same at $30/h, by the paper's saturation table", seconds(lambda: plan(catalog, by_table), runs=9)
        )
    )
    for budget in ("3", "30"):
        arguments = ("plan", "--catalog", BIG, "--budget", budget, "--json")
        found.append(_command(f"deepvm plan --budget {budget}", arguments, below=1.5))
    notes = [_described(catalog, rows, update.report.kept)]
    for usd in (3.0, 10.0, 30.0):
        mixed, note = _mixed(catalog, usd)
        found.append(mixed)
        notes.append(note)
    found.append(
        _command(
            "deepvm plan --budget 30 --mixed", ("plan", "--catalog", BIG, "--budget", "30", "--mixed", "--json"), runs=5
        )
    )
    return found, notes


def _mixed(catalog: Catalog, usd: float) -> tuple[Measurement, str]:
    one = plan(catalog, Request(budget_usd=usd)).recommendations[0]
    several = plan(catalog, Request(budget_usd=usd, mixed=True)).recommendations[0]
    taken = seconds(lambda: plan(catalog, Request(budget_usd=usd, mixed=True)), runs=5)
    gain = several.performance / one.performance - 1
    return (
        measurement(f"plan at ${usd:g}/h with --mixed, in process", taken),
        f"At ${usd:g}/h several GPU types perform {gain:+.2%} over one.",
    )


def _described(catalog: Catalog, rows: int, kept: int) -> str:
    gpus = sum(i.accelerator is not None for i in catalog.instances)
    offers = sum(map(len, catalog.prices.values()))
    return (
        f"The generated catalogue has {rows:,} rows, of which {kept:,} are kept: {len(catalog.instances):,} types "
        f"({gpus} accelerated), {len(catalog.regions)} regions, {len(catalog.zones)} zones, {offers:,} offers."
    )


def _command(what: str, arguments: tuple[str, ...], *, runs: int = 9, below: float | None = None) -> Measurement:
    """Wall time of the command as a user starts it."""
    program = str(Path(sys.executable).with_name("deepvm"))

    def start() -> None:
        # Its output is read, since waiting for an exit with a deadline polls, in steps of 50 ms.
        subprocess.run([program, *arguments], check=True, stdout=subprocess.PIPE, timeout=DEADLINE_S)

    return measurement(f"`{what}`, wall", seconds(start, runs=runs), below=below)
