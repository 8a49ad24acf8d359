"""``deepvm run``: a plan made real, here or in a cloud; its report, its end, and going on with it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from deepvm.cli.render import JsonFlag, stderr
from deepvm.errors import UnknownName, UsageError
from deepvm.policy.batch import BATCH_POLICIES, KEEP_GLOBAL
from deepvm.units import parse_bytes

if TYPE_CHECKING:
    from deepvm.runtime.cluster import Cluster
    from deepvm.runtime.run_spec import RunSpec
    from deepvm.runtime.supervise.local_run import Ended
    from deepvm.runtime.supervise.run_folder import RunFolder
    from deepvm.runtime.supervise.supervisor import Supervisor

BACKENDS = ("local", "ec2", "skypilot")
HERE, CLOUD, RUNS = "Here", "In a cloud", "Runs that there are"


def command(
    context: typer.Context,
    plan: Annotated[Path | None, typer.Argument(metavar="PLAN", help="What deepvm plan -o wrote.")] = None,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="-- SCRIPT ARGS", help="What to train, after two dashes.")
    ] = None,
    on: Annotated[str, typer.Option("--on", help=f"Where: {', '.join(BACKENDS)}.")] = "local",
    rank: Annotated[int, typer.Option("--rank", min=1, help="Which of the plan's recommendations.")] = 1,
    name: Annotated[str | None, typer.Option("--name", help="The run's name [script and time].")] = None,
    policy: Annotated[
        str, typer.Option("--save", help="When to save, as '100 steps or 60s'.")
    ] = "every 10s or at notice",
    after_loss: Annotated[
        str, typer.Option("--after-loss", help="wait, wait:30s, shrink or shrink:2: what survivors do.")
    ] = "wait",
    batch: Annotated[
        str, typer.Option("--batch", help=f"{' or '.join(BATCH_POLICIES)} when ranks come and go.")
    ] = KEEP_GLOBAL,
    durable: Annotated[str | None, typer.Option("--durable", metavar="URL", help="Also keep checkpoints here.")] = None,
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", min=0, help="How often workers that fail by themselves are started again.")
    ] = 3,
    preempt: Annotated[
        str,
        typer.Option(
            "--preempt",
            metavar="FAULTS",
            rich_help_panel=HERE,
            help="Take machines away: at:20s:worker/1, at:step:50:worker/*, poisson:3/h, trace:FILE.",
        ),
    ] = "",
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, rich_help_panel=HERE, help="Most machines that train [cores].")
    ] = None,
    memory: Annotated[
        str | None, typer.Option("--memory", rich_help_panel=HERE, help="Of each memory node, as 600MB.")
    ] = None,
    isolate: Annotated[
        bool, typer.Option("--isolate", rich_help_panel=HERE, help="A network namespace for each machine (root).")
    ] = False,
    bandwidth: Annotated[
        str | None,
        typer.Option("--bandwidth", rich_help_panel=HERE, help="Of each isolated machine, as 1Gbit."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", rich_help_panel=HERE, help="Of faults by chance.")] = 0,
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="RUN", rich_help_panel=RUNS, help="Go on with a run.")
    ] = None,
    report: Annotated[
        str | None, typer.Option("--report", metavar="RUN", rich_help_panel=RUNS, help="Show a run's report.")
    ] = None,
    down: Annotated[
        str | None,
        typer.Option("--down", metavar="RUN", rich_help_panel=RUNS, help="End a run's machines, leave nothing."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", rich_help_panel=CLOUD, help="Print what would be done, and do nothing.")
    ] = False,
    option: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", rich_help_panel=CLOUD, help="A setting of the cloud, repeatable."),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Train on the machines of a plan; lost ones are replaced, and training goes on from the newest checkpoint."""
    if on not in BACKENDS:
        raise UnknownName("backend", on, BACKENDS)
    if sum(given is not None for given in (resume, report, down)) > 1:
        raise UsageError("--resume, --report and --down are one at a time")
    given = _given(context)
    if report is not None:
        _refuse(given - {"report", "json"}, context, f"--report {report} shows what is in its ledger")
        _report(report, as_json=json)
        return
    if down is not None:
        from deepvm.cli.run.cloud import end

        _refuse(given - {"down", "json"}, context, f"--down {down} ends a run as it is")
        end(down, as_json=json)
        return
    how: dict[str, Any] = {
        "policy": policy, "after_loss": after_loss, "batch": batch, "durable": durable, "max_restarts": max_restarts,
        "workers": workers, "memory_bytes": None if memory is None else parse_bytes(memory), "isolate": isolate,
        "bandwidth_bits_per_s": None if bandwidth is None else _bits(bandwidth), "seed": seed,
    }  # fmt: skip
    if resume is not None:
        from deepvm.runtime.supervise import local_run

        fields = {"memory": "memory_bytes", "bandwidth": "bandwidth_bits_per_s"}
        changes = {
            fields.get(word, word): how[fields.get(word, word)] for word in given if fields.get(word, word) in how
        }
        fixed = {word for word in given if fields.get(word, word) not in how} - {"resume", "json", "preempt"}
        if on == "local":
            fixed.discard("on")
        _refuse(fixed, context, f"--resume {resume} continues with the run's own plan and script")
        _show(
            lambda begun, watch: local_run.resume(resume, preempt=preempt, begun=begun, watch=watch, **changes),
            as_json=json,
        )
        return
    if plan is None or not words:
        raise UsageError("what is to be run? write: deepvm run plan.json -- train.py ARGS")
    from deepvm.runtime.cluster import load_cluster

    cluster = load_cluster(plan, rank=rank)
    spec = _spec(words, rank=rank, preempt=preempt, **how)
    if on != "local":
        from deepvm.cli.run.cloud import start

        start(on, cluster, spec, name=name, options=option or [], dry_run=dry_run, as_json=json)
        return
    if dry_run or option:
        raise UsageError("--dry-run and --set are for clouds: give --on ec2 or --on skypilot")
    from deepvm.runtime.supervise import local_run

    _show(lambda begun, watch: local_run.run_local(cluster, spec, name=name, begun=begun, watch=watch), as_json=json)


def _given(context: typer.Context) -> set[str]:
    """Names of the parameters that were written, and are not left as they are by default."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name != "DEFAULT"}


def _refuse(names: set[str], context: typer.Context, because: str) -> None:
    """Say which parameters cannot be taken, rather than pass over them."""
    if not names:
        return
    written = {"plan": "PLAN", "words": "-- SCRIPT ARGS"}
    shown = [written.get(p.name or "", p.opts[0]) for p in context.command.params if p.name in names]
    raise UsageError(f"{because}: leave out {', '.join(shown)}")


def _spec(words: list[str], **options: Any) -> RunSpec:
    from deepvm.runtime.entry import parse_entry
    from deepvm.runtime.run_spec import RunSpec

    entry = parse_entry(words)
    return RunSpec(script=entry.script, args=entry.args, module=entry.module, **options)


def _bits(text: str) -> int:
    """1Gbit, 500Mbit; a plain number of bits a second."""
    lower = text.lower().removesuffix("/s").removesuffix("bit").strip()
    factor = {"k": 10**3, "m": 10**6, "g": 10**9}.get(lower[-1:], 1)
    try:
        found = float(lower.rstrip("kmg")) * factor
    except ValueError:
        found = 0.0
    if not 1e3 <= found < 1e13:
        raise UsageError(f"{text!r} is no bandwidth: write it like 1Gbit or 500Mbit")
    return int(found)


# --- runs here ------------------------------------------------------------------------------------------------------


def _show(run: Callable[[Any, Any], Ended], *, as_json: bool) -> None:
    from deepvm.cli.run.display import Display
    from deepvm.cli.run.report import show_report

    shown: list[Any] = []

    def begun(folder: RunFolder, cluster: Cluster, supervisor: Supervisor) -> None:
        for note in cluster.notes:
            stderr.print(f"[dim]{escape(note)}[/]", soft_wrap=True)
        stderr.print(f"[bold]run {escape(folder.name)}[/], in {escape(str(folder.path))}", soft_wrap=True)
        shown.append(Display(stderr, log_of=folder.log_of).start())
        _until_interrupted(supervisor)

    try:
        ended = run(begun, lambda view: shown[0](view))
    finally:
        for display in shown:
            display.close()
        signal.signal(signal.SIGINT, signal.default_int_handler)
    outcome = ended.outcome
    for machine, error in outcome.errors.items():
        if error:
            stderr.print(f"[bold red]{escape(machine)} said last:[/]")
            stderr.print(error.rstrip(), markup=False, soft_wrap=True)
    show_report(ended.report, as_json)  # of the ledger that was open: its file may have been deleted
    sys.stdout.flush()
    if outcome.outcome == "interrupted":
        stderr.print(
            f"interrupted; its checkpoints are kept. Go on with: deepvm run --resume {ended.run}", soft_wrap=True
        )
        raise typer.Exit(130)
    if outcome.outcome == "failed":
        logs = ended.folder / "machines"
        stderr.print(f"[bold red]deepvm:[/] {escape(f'{outcome.why}: logs are in {logs}')}", soft_wrap=True)
        raise typer.Exit(1)


def _until_interrupted(supervisor: Supervisor) -> None:
    """The first Ctrl-C ends the run in good order, the second at once. Who follows it says so: what a signal
    interrupted may be printing."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        del number, frame
        if not supervisor.interrupted:
            supervisor.interrupt()
        else:
            supervisor.stop_now()

    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)


def _report(name: str, *, as_json: bool) -> None:
    import time

    from deepvm.cli.run.report import show_report
    from deepvm.runtime.ledger.ledger import Ledger
    from deepvm.runtime.ledger.report import make_report
    from deepvm.runtime.supervise.run_folder import RunFolder

    folder = RunFolder.find(name)
    with Ledger.open(folder.ledger) as ledger:
        now_s = time.time() if ledger.being_written else None
        report = make_report(ledger.events(), ledger.cluster, now_s, run=ledger.run)
    show_report(report, as_json)
    sys.stdout.flush()
