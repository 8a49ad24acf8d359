"""``python -m deepvm.runtime.launch --nproc-per-node 2 train.py ARGS``: torchrun, with workers from a template.

The options are torchrun's. A restarted worker skips the start of Python and its imports.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepvm.errors import DeepvmError, MissingExtra, UsageError
from deepvm.runtime.workers.forked_worker import script_folder
from deepvm.runtime.workers.template import DEFAULT_PRELOAD, Template

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # the agent sets handlers of its own


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """What to run on this node, and with how many other nodes."""

    script: str
    args: tuple[str, ...] = ()
    module: bool = False  # the script is a module's name, as after ``python -m``
    nproc_per_node: int | str = 1  # or gpu, cpu, auto
    nnodes: str = "1"  # or MIN:MAX
    max_restarts: int = 0
    monitor_interval_s: float = 0.1
    role: str = "default"
    rdzv_backend: str = "c10d"
    rdzv_endpoint: str | None = None  # HOST:PORT; on one node a free port of its own
    rdzv_id: str | None = None
    rdzv_conf: dict[str, Any] = field(default_factory=dict)
    local_addr: str | None = None
    log_dir: str | None = None
    redirects: str = "0"  # 1: stdout, 2: stderr, 3: both into files of log_dir; or by rank, as 0:3,1:1
    tee: str = "0"  # the same, and shown
    preload: tuple[str, ...] = DEFAULT_PRELOAD
    template: bool = True

    def __post_init__(self) -> None:
        if not self.module and not Path(self.script).is_file():
            raise UsageError(f"script {self.script!r} not found in {os.getcwd()}: give a file, or a module with -m")
        if self.max_restarts < 0:
            raise UsageError(f"max_restarts is {self.max_restarts}: it must be zero or more")
        if not self.monitor_interval_s > 0:
            raise UsageError(f"the monitor interval is {self.monitor_interval_s} s: it must be above zero")
        if isinstance(self.nproc_per_node, int) and self.nproc_per_node < 1:
            raise UsageError(f"nproc_per_node is {self.nproc_per_node}: it must be one or more")
        if self.rdzv_backend == "static":
            raise UsageError("rdzv_backend is 'static', which supports no restarts: use c10d and --rdzv-endpoint")
        if self.nodes[1] > 1 and self.rdzv_endpoint is None:
            raise UsageError(f"{self.nnodes} nodes need a rendezvous: give all of them one --rdzv-endpoint HOST:PORT")
        if self.log_dir is None and (self.redirects, self.tee) != ("0", "0"):
            raise UsageError("redirected output needs a folder: give --log-dir")

    @property
    def nodes(self) -> tuple[int, int]:
        low, colon, high = self.nnodes.partition(":")
        try:
            least, most = int(low), int(high if colon else low)
        except ValueError:
            least = most = 0
        if not 0 < least <= most:
            raise UsageError(f"{self.nnodes!r} is not a valid number of nodes: write 4, or 1:4 for a range")
        return least, most

    @property
    def rendezvous(self) -> dict[str, Any]:
        alone = self.rdzv_endpoint is None
        return {
            "backend": self.rdzv_backend,
            "endpoint": "localhost:0" if alone else self.rdzv_endpoint,
            "run_id": self.rdzv_id or (str(uuid.uuid4()) if alone else "none"),
            "local_addr": self.local_addr,
            **self.rdzv_conf,
        }


def launch(script: str, args: Sequence[str] = (), **options: Any) -> None:
    """Run a script on every worker of this node until all are done; options are the fields of ``Launch``."""
    run(Launch(script=script, args=tuple(args), **options))


def run(what: Launch) -> None:
    """Run until all workers are done. Raise torch's ChildFailedError if they failed for the last time."""
    count = what.nproc_per_node if isinstance(what.nproc_per_node, int) else _count(what.nproc_per_node)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_restored(several=count > 1))
        log_dir = what.log_dir or stack.enter_context(tempfile.TemporaryDirectory(prefix="deepvm-launch-"))
        template = None
        if what.template:
            first_path = script_folder(what.script, what.module)
            template = stack.enter_context(
                Template(preload=what.preload, first_path=first_path, label=[what.script, *what.args])
            )
        elastic = _elastic()  # imports torch while the template imports it, too
        if template is not None:
            template.ready()  # raises a refusal before anything else starts
        elastic.run_agent(
            script=what.script,
            args=what.args,
            as_module=what.module,
            template=template,
            local_world_size=count,
            nodes=what.nodes,
            max_restarts=what.max_restarts,
            monitor_interval_s=what.monitor_interval_s,
            role=what.role,
            log_dir=log_dir,
            redirects=what.redirects,
            tee=what.tee,
            rendezvous=what.rendezvous,
        )


def _elastic() -> Any:
    try:
        from deepvm.runtime.workers import elastic
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtra("launching workers", "train") from None
    return elastic


def _count(word: str) -> int:
    _elastic()
    from torch.distributed.run import determine_local_world_size

    try:
        return int(determine_local_world_size(word))
    except ValueError as error:
        raise UsageError(f"nproc_per_node is {word!r}: {error}") from None


@contextlib.contextmanager
def _restored(*, several: bool) -> Iterator[None]:
    """Set variables for templates and workers, and restore them and the signal handlers afterwards."""
    chosen = {
        # torch's agent would keep one store over all restarts: an early worker would find the addresses of the last
        # round there, and fail. Workers of a template are early.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        # Several workers on one machine would each start a thread for every core; torchrun does the same.
        **({"OMP_NUM_THREADS": "1"} if several else {}),
    }
    chosen = {name: value for name, value in chosen.items() if name not in os.environ}
    if "OMP_NUM_THREADS" in chosen:
        print("OMP_NUM_THREADS is not set: every worker gets one thread", file=sys.stderr)
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    os.environ.update(chosen)
    try:
        yield
    finally:
        for name in chosen:
            os.environ.pop(name, None)
        with contextlib.suppress(ValueError):  # handlers belong to the main thread, which alone changed them
            for number, handler in handlers.items():
                signal.signal(number, handler)


def main(arguments: list[str] | None = None) -> int:
    given = vars(_parser().parse_args(arguments))
    given["args"] = tuple(given["args"])
    if given.pop("standalone"):
        given |= {"rdzv_endpoint": None, "rdzv_id": None, "rdzv_backend": "c10d"}
    for number in (signal.SIGTERM, signal.SIGHUP):  # until the agent sets its handlers: the template must end too
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        run(Launch(**given))
    except DeepvmError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except Exception as error:
        if type(error).__name__ == "ChildFailedError":  # the workers have shown their own errors
            print(error, file=sys.stderr)
            return 1
        if type(error).__name__ == "SignalException":
            ended_by = signal.Signals(getattr(error, "sigval", signal.SIGTERM))
            print(f"ended by {ended_by.name}, with all workers", file=sys.stderr)
            return 128 + ended_by
        raise
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deepvm.runtime.launch", description=__doc__, allow_abbrev=False)

    def option(name: str, **settings: Any) -> None:
        parser.add_argument(f"--{name}", f"--{name.replace('-', '_')}", **settings)

    option("nproc-per-node", type=_workers, default=1, help="workers on this node: a number, gpu, cpu or auto")
    option("nnodes", default="1", help="nodes, as 4 or MIN:MAX")
    option("max-restarts", type=int, default=0, help="how often failed workers are restarted")
    option("monitor-interval", type=float, default=0.1, dest="monitor_interval_s", help="seconds between two polls")
    option("rdzv-endpoint", help="HOST:PORT of the rendezvous")
    option("rdzv-backend", default="c10d", help="the kind of rendezvous")
    option("rdzv-id", help="the job's name in the rendezvous")
    option("rdzv-conf", type=_pairs, default={}, help="KEY=VALUE,... for the rendezvous")
    option("local-addr", help="this node's address, if it cannot be looked up")
    option("role", default="default", help="the workers' role, shown in logs")
    option("log-dir", help="folder of logs and error files")
    option("preload", type=_names, default=DEFAULT_PRELOAD, help="modules that the template imports, with commas")
    parser.add_argument("-r", "--redirects", default="0", help="1 stdout, 2 stderr, 3 both into files; or 0:3,1:1")
    parser.add_argument("-t", "--tee", default="0", help="the same, and shown")
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module's name")
    parser.add_argument("--standalone", action="store_true", help="one node; the rdzv options are ignored")
    no_template = "start every worker as a fresh interpreter"
    parser.add_argument("--no-template", action="store_false", dest="template", help=no_template)
    parser.add_argument("script")
    parser.add_argument("args", nargs=argparse.REMAINDER)
    return parser


def _workers(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _pairs(text: str) -> dict[str, str]:
    try:
        return {key.strip(): value.strip() for key, value in (pair.split("=", 1) for pair in text.split(",") if pair)}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: write KEY=VALUE,KEY=VALUE") from None


if __name__ == "__main__":
    sys.exit(main())
