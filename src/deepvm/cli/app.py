"""The ``deepvm`` command: words in, an exit code out. Registers the sub-commands and turns errors into one sentence."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.markup import escape

import deepvm
from deepvm.cli import catalog, checkpoint, memory_node, plan, reproduce, sweep
from deepvm.cli.render import print_json, stderr
from deepvm.cli.run import command as run_plan
from deepvm.errors import DeepvmError, Infeasible, UsageError, printable

app = typer.Typer(
    name="deepvm",
    help="Train deep networks on spot machines without losing work or money.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("plan")(plan.command)
app.command("sweep")(sweep.command)
app.add_typer(catalog.app, name="catalog")
app.add_typer(checkpoint.app, name="checkpoint")
app.command("reproduce")(reproduce.command)
app.command("run")(run_plan.command)
app.command("memory-node")(memory_node.command)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"deepvm {deepvm.__version__}")
        raise typer.Exit


@app.callback()
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
        command = typer.main.get_command(app)
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
