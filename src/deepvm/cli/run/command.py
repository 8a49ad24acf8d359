"""``deepvm run``: starts, resumes, reports or ends a run, through ``runtime.supervise``."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from deepvm.cli.render import JsonFlag, print_json, stderr
from deepvm.errors import UnknownName, UsageError, printable
from deepvm.policy.batch import BATCH_POLICIES, KEEP_GLOBAL
from deepvm.units import parse_bytes

if TYPE_CHECKING:
    from deepvm.runtime.cluster import Cluster
    from deepvm.runtime.run_spec import RunSpec
    from deepvm.runtime.supervise.local_run import Ended
    from deepvm.runtime.supervise.local_supervisor import Supervisor
    from deepvm.runtime.supervise.run_folder import RunFolder

BACKENDS = ("local", "ec2", "skypilot")
LOCAL, CLOUD, RUNS = "On this machine", "In a cloud", "Existing runs"
_FIELDS = {"memory": "memory_bytes", "bandwidth": "bandwidth_bits_per_s"}  # parameters with other names in RunSpec


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
        str | None, typer.Option("--save", help="When to save, as '100 steps or 60s' [the plan's, else 10s].")
    ] = None,
    after_loss: Annotated[
        str | None,
        typer.Option(
            "--after-loss", help="wait, wait:30s, shrink or shrink:2: what survivors do [the plan's or wait]."
        ),
    ] = None,
    replan_threshold: Annotated[
        str | None,
        typer.Option(
            "--replan-threshold",
            metavar="SHARE",
            help="Move if what is best is better by this, as 20% [30% if the plan has several zones, else never].",
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option("--steps", min=1, help="Of the whole training, for the plan's deadline [the plan's hours]."),
    ] = None,
    batch: Annotated[
        str, typer.Option("--batch", help=f"{' or '.join(BATCH_POLICIES)} when the number of ranks changes.")
    ] = KEEP_GLOBAL,
    durable: Annotated[str | None, typer.Option("--durable", metavar="URL", help="A durable store.")] = None,
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", min=0, help="How often failed workers are restarted.")
    ] = 3,
    preempt: Annotated[
        str,
        typer.Option(
            "--preempt",
            metavar="FAULTS",
            rich_help_panel=LOCAL,
            help="Take machines away: at:20s:worker/1, at:step:50:worker/*, poisson:3/h, trace:FILE, "
            "or play a recorded market: market:DIR:meaning=up.",
        ),
    ] = "",
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, rich_help_panel=LOCAL, help="Most machines that train [cores].")
    ] = None,
    memory: Annotated[
        str | None, typer.Option("--memory", rich_help_panel=LOCAL, help="Of each memory node, as 600MB.")
    ] = None,
    isolate: Annotated[
        bool, typer.Option("--isolate", rich_help_panel=LOCAL, help="A network namespace for each machine (root).")
    ] = False,
    bandwidth: Annotated[
        str | None,
        typer.Option("--bandwidth", rich_help_panel=LOCAL, help="Of each isolated machine, as 1Gbit."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", rich_help_panel=LOCAL, help="Of faults by chance.")] = 0,
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="RUN", rich_help_panel=RUNS, help="Continue a run.")
    ] = None,
    report: Annotated[
        str | None, typer.Option("--report", metavar="RUN", rich_help_panel=RUNS, help="Show a run's report.")
    ] = None,
    down: Annotated[
        str | None,
        typer.Option("--down", metavar="RUN", rich_help_panel=RUNS, help="End a run's machines."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", rich_help_panel=CLOUD, help="Print the calls to the cloud without making them.")
    ] = False,
    option: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", rich_help_panel=CLOUD, help="A setting of the cloud, repeatable."),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Train on the machines of a plan; lost ones are replaced, and training resumes from the newest checkpoint."""
    if on not in BACKENDS:
        raise UnknownName("backend", on, BACKENDS)
    if sum(given is not None for given in (resume, report, down)) > 1:
        raise UsageError("--resume, --report and --down exclude each other: give one of them")
    given = _given(context)
    if report is not None:
        _refuse(given - {"report", "json"}, context, f"--report {report} shows the run's ledger")
        report_run(report, as_json=json)
        return
    if down is not None:
        _refuse(given - {"down", "json"}, context, f"--down {down} takes no other options")
        end_run(down, as_json=json)
        return
    how: dict[str, Any] = {
        "batch": batch, "durable": durable, "max_restarts": max_restarts, "steps": steps,
        "workers": workers, "memory_bytes": None if memory is None else parse_bytes(memory), "isolate": isolate,
        "bandwidth_bits_per_s": None if bandwidth is None else _bits(bandwidth), "seed": seed,
    }  # fmt: skip
    if resume is not None:
        from deepvm.runtime.supervise import local_run
        from deepvm.runtime.supervise.policies import parse_threshold

        threshold = None if replan_threshold is None else parse_threshold(replan_threshold)
        how |= {"policy": policy, "after_loss": after_loss, "replan_threshold": threshold}
        changes = {field: how[field] for word in given if (field := _FIELDS.get(word, word)) in how}
        fixed = {word for word in given if _FIELDS.get(word, word) not in how} - {"resume", "json", "preempt"}
        if on == "local":
            fixed.discard("on")
        _refuse(fixed, context, f"--resume {resume} continues with the run's own plan and script")
        _show(
            lambda begun, watch: local_run.resume(resume, preempt=preempt, begun=begun, watch=watch, **changes),
            as_json=json,
        )
        return
    if plan is None or not words:
        raise UsageError("no plan or script given: write deepvm run plan.json -- train.py ARGS")
    from deepvm.runtime.cluster import load_cluster
    from deepvm.runtime.entry import parse_entry
    from deepvm.runtime.run_spec import RunSpec
    from deepvm.runtime.supervise.policies import choose_policies

    cluster, entry = load_cluster(plan, rank=rank), parse_entry(words)
    chosen = choose_policies(cluster.conduct, policy=policy, after_loss=after_loss, replan_threshold=replan_threshold)
    spec = RunSpec(
        script=entry.script, args=entry.args, module=entry.module, rank=rank, preempt=preempt,
        policy=chosen.policy, after_loss=chosen.after_loss, replan_threshold=chosen.replan_threshold,
        origins=chosen.origins, **how,
    )  # fmt: skip
    if on != "local":
        run = name or spec.new_name()
        _run_in_cloud(on, cluster, spec, run, options=option or [], dry_run=dry_run, as_json=json)
        return
    if dry_run or option:
        raise UsageError("--dry-run and --set are for clouds: give --on ec2 or --on skypilot")
    from deepvm.runtime.supervise import local_run

    _show(lambda begun, watch: local_run.run_local(cluster, spec, name=name, begun=begun, watch=watch), as_json=json)


def _given(context: typer.Context) -> set[str]:
    """Return the names of the parameters that the user wrote."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name != "DEFAULT"}


def _refuse(names: set[str], context: typer.Context, because: str) -> None:
    """Raise UsageError if any of these parameters was given."""
    if not names:
        return
    written = {"plan": "PLAN", "words": "-- SCRIPT ARGS"}
    shown = [written.get(p.name or "", p.opts[0]) for p in context.command.params if p.name in names]
    raise UsageError(f"{because}: leave out {', '.join(shown)}")


def _bits(text: str) -> int:
    """Read 1Gbit, 500Mbit or a plain number of bits per second."""
    lower = text.lower().removesuffix("/s").removesuffix("bit").strip()
    factor = {"k": 10**3, "m": 10**6, "g": 10**9}.get(lower[-1:], 1)
    try:
        found = float(lower.rstrip("kmg")) * factor
    except ValueError:
        found = 0.0
    if not 1e3 <= found < 1e13:
        raise UsageError(f"{text!r} is not a valid bandwidth: write it like 1Gbit or 500Mbit")
    return int(found)


# --- in a cloud -----------------------------------------------------------------------------------------------------


def _run_in_cloud(
    on: str, cluster: Cluster, spec: RunSpec, run: str, *, options: list[str], dry_run: bool, as_json: bool
) -> None:
    from deepvm.runtime.supervise.cloud_run import run_cloud

    messages: list[str] = []

    def show(text: str) -> None:
        messages.append(text)
        if dry_run and not as_json:
            print(printable(text))
        elif not dry_run:
            stderr.print(text, markup=False, soft_wrap=True)

    try:
        run_cloud(on, cluster, spec, run, options=options, dry_run=dry_run, show=show)
    except KeyboardInterrupt:
        if not dry_run:
            detached = "" if on == "ec2" else "; while deepvm run is not attached, lost machines are not replaced"
            text = f"the run continues in the cloud and costs money: end it with deepvm run --down {run}{detached}"
            stderr.print(text, soft_wrap=True)
        raise
    if as_json:
        print_json({"run": run, "on": on, "dry_run": dry_run, "said": messages})


def end_run(name: str, *, as_json: bool) -> None:
    from deepvm.runtime.supervise import cloud_run

    removed = cloud_run.end(name)
    if as_json:
        print_json({"run": name, "outcome": "ended"} | ({} if removed is None else {"removed": removed}))
    elif removed:
        stderr.print(f"removed what killed runs left on this machine: {', '.join(removed)}", soft_wrap=True)
    elif removed is not None:
        stderr.print(f"run {name} has ended on this machine: nothing is left to remove")
    else:
        stderr.print(f"run {name} is ended: nothing of it is left in the cloud")


# --- on this machine ------------------------------------------------------------------------------------------------


def _show(run: Callable[[Any, Any], Ended], *, as_json: bool) -> None:
    from deepvm.cli.run.display import Display
    from deepvm.cli.run.report import show_report

    shown: list[Any] = []

    def begun(folder: RunFolder, cluster: Cluster, supervisor: Supervisor) -> None:
        for note in cluster.notes:
            stderr.print(f"[dim]{escape(note)}[/]", soft_wrap=True)
        stderr.print(f"[bold]run {escape(folder.name)}[/], in {escape(str(folder.path))}", soft_wrap=True)
        shown.append(Display(stderr, log_of=folder.log_of).start())
        # The supervisor itself shows what a signal does: the interrupted code may be printing.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: supervisor.interrupt())

    try:
        ended = run(begun, lambda view: shown[0](view))
    finally:
        for display in shown:
            display.close()
        signal.signal(signal.SIGINT, signal.default_int_handler)
    outcome = ended.outcome
    for machine, error in outcome.errors.items():
        if error:
            stderr.print(f"[bold red]last output of {escape(machine)}:[/]")
            stderr.print(error.rstrip(), markup=False, soft_wrap=True)
    show_report(ended.report, as_json)
    sys.stdout.flush()
    if outcome.outcome == "interrupted":
        stderr.print(f"interrupted: continue with deepvm run --resume {ended.run}", soft_wrap=True)
        raise typer.Exit(130)
    if outcome.outcome == "failed":
        logs = ended.folder / "machines"
        stderr.print(f"[bold red]deepvm:[/] {escape(f'{outcome.why}: logs are in {logs}')}", soft_wrap=True)
        raise typer.Exit(1)


def report_run(name: str, *, as_json: bool) -> None:
    import time
    from dataclasses import replace

    from deepvm.cli.run.report import show_report
    from deepvm.runtime.ledger.ledger import Ledger
    from deepvm.runtime.ledger.report import make_report
    from deepvm.runtime.ledger.sqlite_file import being_written
    from deepvm.runtime.supervise.run_folder import RunFolder

    folder = RunFolder.find(name)
    with Ledger.open(folder.ledger) as ledger:
        now_s = time.time() if being_written(folder.ledger) else None
        report = make_report(ledger.events(), ledger.cluster, now_s, run=ledger.run)
    if folder.profile.is_file():
        report = replace(report, profile=str(folder.profile))
    show_report(report, as_json)
    sys.stdout.flush()
