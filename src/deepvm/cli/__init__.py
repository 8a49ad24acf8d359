"""The command line: parse, call one function, render."""

from deepvm.cli.app import main

__all__ = ["main"]
