"""The ``deepvm`` command: words in, an exit code out. Loads the named command and turns errors into one sentence."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.markup import escape

import deepvm
from deepvm.cli.render import print_json, stderr
from deepvm.errors import DeepvmError, Infeasible, UsageError, printable

# A command's module is imported when the command is named: `deepvm --help` needs only these sentences.
COMMANDS = {
    "plan": ("plan", "Plan the best cluster for a budget out of spot and on-demand machines."),
    "sweep": ("sweep", "Compare the policies over a range of budgets."),
    "profile": ("calibrate.profile", "Measure a training job, or compute that of a model, for deepvm plan --job."),
    "reproduce": ("reproduce", "Reproduce the paper's tables and figures, and compare them with the published ones."),
    "calibrate": ("calibrate.command", "Measure this machine: compute, scaling, network, overheads; show."),
    "run": (
        "run.command",
        "Train on the machines of a plan; lost ones are replaced, and training resumes from the newest checkpoint.",
    ),
    "runs": ("run.runs", "Existing runs: ls, show, logs, stop, down, export."),
    "simulate": (
        "simulate.simulate",
        "Replay a job on a spot market before a cent is spent: cost, time and losses over many starts.",
    ),
    "backtest": (
        "simulate.backtest",
        "Replay a job on recorded spot markets: what every strategy would have paid, for every start.",
    ),
    "memory-node": (
        "memory_node",
        "Keep checkpoints in this machine's memory; SIGTERM stops it after the uploads in progress.",
    ),
    "catalog": ("catalog", "What can be rented: list, show, update, import, check, history, diff."),
    "checkpoint": ("checkpoint", "Inspect any store of checkpoints: ls, show, verify, export, pull, rm."),
}


def make_app(words: Sequence[str]) -> typer.Typer:
    """Return the application with the commands among the words loaded, and the others with their help alone."""
    app = typer.Typer(
        name="deepvm",
        help="Train deep networks on spot machines without losing work or money.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    completing = "_DEEPVM_COMPLETE" in os.environ  # the shell's words are not among ours
    for name, (module_name, summary) in COMMANDS.items():
        if name not in words and not completing:
            app.command(name, help=summary)(_not_loaded)
            continue
        module = importlib.import_module(f"deepvm.cli.{module_name}")
        if hasattr(module, "app"):
            app.add_typer(module.app, name=name)
        else:
            app.command(name)(module.command)
    return app


def _not_loaded() -> None:
    raise AssertionError("a command that was not named cannot run")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"deepvm {deepvm.__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    del version


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code: 0 done, 1 failed, 2 bad usage, 3 nothing feasible."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(run(words))


def run(words: Sequence[str]) -> int:
    try:
        command = typer.main.get_command(make_app(words))
        _prepare(command)
        result = command(args=list(words), standalone_mode=False)
        return result if isinstance(result, int) else 0
    except DeepvmError as error:
        return _fail(error, error.exit_code, as_json="--json" in words)
    except typer.Exit as leave:
        return int(leave.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", 1, as_json="--json" in words)
    except BrokenPipeError:  # the reader ended (| head)
        sys.stderr.close()
        return 1
    except Exception as error:
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        if not message():  # the help was shown instead
            return 2
        return _fail(message(), 2, as_json="--json" in words)  # click's own message about usage


def _prepare(command: Any) -> None:
    """Escape help texts and refuse repeated options, in a command and all below it."""
    _escape_help(command)
    _refuse_repeats(command)
    for below in getattr(command, "commands", {}).values():
        _prepare(below)


def _escape_help(command: Any) -> None:
    """Escape brackets, which Rich would read as markup."""
    for owner in (command, *command.params):
        for name in ("help", "short_help"):
            text = getattr(owner, name, None)
            if text:
                setattr(owner, name, escape(text))


def _refuse_repeats(command: Any) -> None:
    """Refuse a single-valued option that is given twice: its first value would be lost silently."""
    make_parser = command.make_parser

    def make_strict_parser(context: Any) -> Any:
        parser = make_parser(context)
        parse_args = parser.parse_args

        def parse_once(args: list[str]) -> Any:
            values, rest, order = parse_args(args)
            for option in order:
                single = option.param_type_name == "option" and not (option.multiple or option.is_flag or option.count)
                if single and order.count(option) > 1 and not context.resilient_parsing:
                    raise UsageError(f"{option.opts[0]} is given {order.count(option)} times: it takes one value")
            return values, rest, order

        parser.parse_args = parse_once
        return parser

    command.make_parser = make_strict_parser


def _fail(error: DeepvmError | str, code: int, *, as_json: bool) -> int:
    if as_json:
        document: dict[str, object] = {"message": str(error), "exit_code": code}
        if isinstance(error, Infeasible):
            document["cheapest_usd"] = error.cheapest_usd
        print_json({"error": document})
    stderr.print(f"[bold red]deepvm:[/] {escape(printable(str(error)))}", soft_wrap=True)
    return code
