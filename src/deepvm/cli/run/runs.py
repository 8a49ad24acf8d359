"""``deepvm runs``: existing runs, here and in clouds: ls, show, logs, stop, down, export."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from deepvm.cli.render import JsonFlag, console, print_json, safe, stderr, table
from deepvm.cli.run import command as run_command
from deepvm.errors import UnknownName, UsageError
from deepvm.units import parse_seconds

app = typer.Typer(help="Existing runs: ls, show, logs, stop, down, export.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="RUN", help="A run's name, or the path of its folder.")]

STOP_S = 300.0  # a run saves, and its memory nodes write what only they have
POLL_S = 0.1
_TAIL_BYTES = 2**20


@app.command("ls")
def ls(json: JsonFlag = False) -> None:
    """List all runs whose folders are on this machine, oldest first."""
    from deepvm.runtime.supervise.run_list import all_overviews

    found = sorted(all_overviews(), key=lambda each: each.started_s or 0.0)
    if json:
        print_json({"runs": [each.to_json() for each in found]})
        return
    if not found:
        console.print("no runs: start one with deepvm run plan.json -- train.py")
        return
    rows = table(None, "run", "on", "state", "started", "script")
    for each in found:
        started = "" if each.started_s is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(each.started_s))
        rows.add_row(safe(each.run), safe(each.on), safe(each.state), started, safe(each.script))
    console.print(rows)


@app.command("show")
def show(name: Name, json: JsonFlag = False) -> None:
    """Show a run's report: steps, losses, checkpoints, dollars. The same as deepvm run --report RUN."""
    run_command.report_run(name, as_json=json)


@app.command("logs")
def logs(
    name: Name,
    machine: Annotated[str | None, typer.Argument(help="Such as worker/1 [the first that trains].")] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="The last lines.")] = 100,
    json: JsonFlag = False,
) -> None:
    """Show the last output of a machine of a local run."""
    from deepvm.runtime.ledger.ledger import Ledger
    from deepvm.runtime.log_tail import tail_text
    from deepvm.runtime.supervise.run_folder import RunFolder

    folder = RunFolder.find(name)
    with Ledger.open(folder.ledger) as ledger:
        machines = ledger.cluster.machines
    chosen = machine or next((each.name for each in machines if each.trains), machines[0].name)
    if chosen not in (known := [each.name for each in machines]):
        raise UnknownName("machine", chosen, known)
    log = folder.log_of(chosen)
    if not log.is_file():
        raise UsageError(f"{chosen} of run {name} has no log on this machine: it is in a cloud, or was never started")
    last = tail_text(log, most_bytes=_TAIL_BYTES).splitlines()[-lines:]
    if json:
        print_json({"run": folder.name, "machine": chosen, "log": str(log), "lines": last})
        return
    for line in last:
        console.print(safe(line), soft_wrap=True)


@app.command("stop")
def stop(name: Name, json: JsonFlag = False) -> None:
    """End a run on this machine after a save, as Ctrl-C does; deepvm run --resume continues it."""
    from deepvm.runtime.ledger.sqlite_file import being_written
    from deepvm.runtime.supervise.run_folder import RunFolder

    folder = RunFolder.find(name)
    if (on := folder.backend_name) != "local":
        raise UsageError(f"run {name} is on {on}: end it with deepvm runs down {name}")
    if not (folder.ledger.exists() and being_written(folder.ledger)):
        raise UsageError(f"run {name} is not running on this machine")
    folder.request_stop()
    deadline_s = time.monotonic() + STOP_S
    with stderr.status(f"run {safe(name)} saves and ends"):
        while being_written(folder.ledger):
            if time.monotonic() > deadline_s:
                raise UsageError(f"run {name} has not ended within {STOP_S:.0f} s: press Ctrl-C where it runs")
            time.sleep(POLL_S)
    if json:
        print_json({"run": folder.name, "outcome": "stopped"})
    else:
        stderr.print(f"run {safe(folder.name)} has ended: continue with deepvm run --resume {safe(name)}")


@app.command("down")
def down(name: Name, json: JsonFlag = False) -> None:
    """End all machines of a run in a cloud. The same as deepvm run --down RUN."""
    run_command.end_run(name, as_json=json)


@app.command("export")
def export(
    name: Name,
    trace: Annotated[Path, typer.Option("--trace", metavar="DIR", help="Write there what the market did to the run.")],
    tick: Annotated[
        str | None, typer.Option("--tick", help="Of the traces [1s up to an hour, 10s up to a day, else 60s].")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Export what the market did to a run, as traces that deepvm backtest and simulate read with --meaning up."""
    from deepvm.market.trace_writer import write_trace
    from deepvm.runtime.ledger.ledger import Ledger
    from deepvm.runtime.ledger.market_record import market_traces
    from deepvm.runtime.supervise.run_folder import RunFolder

    folder = RunFolder.find(name)
    with Ledger.open(folder.ledger) as ledger:
        found = market_traces(ledger.events(), ledger.cluster, None if tick is None else parse_seconds(tick))
    if not found:
        raise UsageError(f"run {name} held no machine on spot: there is nothing to export")
    names = [folder.name] if len(found) == 1 else [f"{folder.name}-{number}" for number in range(1, len(found) + 1)]
    files = [write_trace(each, trace, name=set_name) for each, set_name in zip(found, names, strict=True)]
    if json:
        rows: list[dict[str, Any]] = [
            {"file": str(path), "zone": each.zone, "machines": each.machines, "hours": each.hours}
            for each, path in zip(found, files, strict=True)
        ]
        print_json({"run": folder.name, "meaning": "up", "kind": "held", "traces": rows})
        return
    for each, path in zip(found, files, strict=True):
        console.print(
            safe(f"{path}: {each.machines} machines in {each.zone}, {each.hours * 60:.3g} min"), soft_wrap=True
        )
    console.print(safe(f"read them with deepvm backtest --traces {trace} --meaning up"), soft_wrap=True)
