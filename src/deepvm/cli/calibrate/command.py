"""``deepvm calibrate``: its subcommands."""

from __future__ import annotations

import typer

from deepvm.cli.calibrate import machine, network

app = typer.Typer(help="Measure this machine: compute, scaling, network, overheads; show.", no_args_is_help=True)
machine.register(app)
network.register(app)
