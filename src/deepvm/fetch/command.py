"""``deepvm-fetch``: a command line -> a segment (``pull``), which is kept until the trainer has read it.

It starts beside the trainer, so imports must be few: no torch, no numpy, no Typer.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from deepvm import variables
from deepvm.errors import DeepvmError, NotFound, UsageError
from deepvm.fetch import segment, segment_files
from deepvm.fetch.pull import Pulled, Unwanted, pull
from deepvm.fetch.segment_writer import SegmentWriter
from deepvm.store.base import check_run
from deepvm.store.urls import KNOWN, open_stores
from deepvm.units import format_bytes, parse_seconds

NICENESS = 4  # the trainer's imports keep their core; its first step leaves enough for the network
WATCH_S = 0.05  # between checks for a signal, and whether readers removed the segment
KEEP_S = 600.0  # a trainer that has not started by then will not; free the memory
INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with suppress(OSError):
        os.nice(NICENESS)
    logging.basicConfig(format="deepvm-fetch: %(message)s", level=logging.INFO, stream=sys.stderr)
    try:
        return _run(options, stop)
    except Unwanted:
        print("deepvm-fetch: stopped before the checkpoint was whole: nothing needs it any longer", file=sys.stderr)
        return INTERRUPTED if stop.is_set() else 0
    except DeepvmError as error:
        print(f"deepvm-fetch: {error}", file=sys.stderr)
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="deepvm-fetch",
        description="Pull a run's newest checkpoint into shared memory while the trainer still starts. Start it beside "
        "the trainer, as the same user; deepvm.Checkpointer.restore() finds it by the run's name.",
        epilog=f"{variables.TOKEN} and {variables.RUN_KEY} open memory nodes, as they do for the trainer. "
        "Exit codes: 0 done, or no checkpoint yet; 1 failed; 2 bad usage.",
    )
    parser.add_argument("stores", nargs="+", metavar="STORE_URL", help=f"nearest first: {', '.join(KNOWN)}")
    parser.add_argument("--run", default="default", help="the run's name, as given to Checkpointer (default: default)")
    parser.add_argument("--step", type=int, help="this checkpoint instead of the newest")
    parser.add_argument(
        "--into", type=Path, metavar="PATH", help=f"the file to fill; set {segment.PATH_VARIABLE} for the trainer"
    )
    parser.add_argument("--keep-s", default=str(KEEP_S), help=f"how long to wait for the trainer (default: {KEEP_S:g})")
    parser.add_argument("--json", action="store_true", help="print one JSON document once the checkpoint is fetched")
    return parser


def _run(options: argparse.Namespace, stop: threading.Event) -> int:
    run, keep_s = check_run(options.run), parse_seconds(options.keep_s)
    if keep_s <= 0:
        raise UsageError(f"--keep-s {options.keep_s} would drop the checkpoint at once: give the trainer some time")
    path = segment_files.default_path(run) if options.into is None else options.into.absolute()
    token, key = os.environ.get(variables.TOKEN), os.environ.get(variables.RUN_KEY)
    stores = open_stores(options.stores, token=token, key=key)
    try:
        found = pull(stores, run, options.step, path, stop=stop)
    finally:
        for store in stores:
            store.close()
    if found is None and options.step is not None:
        raise NotFound(f"no store has step {options.step} of run {run}")
    writer, pulled = found or (None, None)
    _log(run, pulled, path)
    if options.json:
        _print_json(run, pulled, path)
    if writer is not None:
        _keep(writer, keep_s, stop)
    return 0


def _log(run: str, pulled: Pulled | None, path: Path) -> None:
    text = f"no store has a checkpoint of run {run} yet: nothing to fetch"
    if pulled is not None:
        rate = pulled.size_bytes / max(pulled.seconds, 1e-9)
        text = (
            f"step {pulled.step} of run {run} from {pulled.store}: {format_bytes(pulled.size_bytes)} in "
            f"{pulled.seconds:.3f} s ({format_bytes(rate)}/s), in {path}"
        )
    logging.getLogger("deepvm.fetch").info("%s", text)


def _print_json(run: str, pulled: Pulled | None, path: Path) -> None:
    document = {
        "run": run,
        "step": pulled.step if pulled else None,
        "store": pulled.store if pulled else None,
        "size_bytes": pulled.size_bytes if pulled else None,
        "seconds": pulled.seconds if pulled else None,
        "passed_over": list(pulled.passed_over) if pulled else [],
        "path": str(path) if pulled else None,
    }
    print(json.dumps(document), flush=True)


def _keep(writer: SegmentWriter, keep_s: float, stop: threading.Event) -> None:
    """Wait until readers have removed the segment; remove it when the time is up."""
    ends, swept_s = time.monotonic() + keep_s, time.monotonic()
    while writer.is_wanted() and not stop.is_set() and time.monotonic() < ends:
        stop.wait(WATCH_S)
        if time.monotonic() - swept_s > segment_files.ORPHAN_S:
            writer.remove_orphans()
            swept_s = time.monotonic()
    writer.give_up()
