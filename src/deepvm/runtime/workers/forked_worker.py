"""The start of a forked worker: it becomes what a fresh interpreter with the same imports would be."""

from __future__ import annotations

import builtins
import importlib
import io
import os
import runpy
import sys
import types
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from types import TracebackType
from typing import Any

_OWN_FILES = {__file__, runpy.__file__, "<frozen runpy>"}


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerJob:
    """What a worker has to run, and the template's environment as it was at its start and as it is now."""

    target: str  # package.module:function
    args: tuple[Any, ...]  # what JSON can say
    env: dict[str, str]
    cwd: str
    started_env: dict[str, str]
    preloaded_env: dict[str, str]
    torch_seed: int | None  # that torch gave itself when the template imported it


def enter(job: WorkerJob) -> None:
    """Run the job, and end as an interpreter ends: with the target's own traceback and the usual exit code."""
    os.chdir(job.cwd)
    _set_environment(job)
    _refresh_random_numbers(job.torch_seed)
    _set_threads(job)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # whole lines, each in one write: others write to the same pipe
            stream.reconfigure(line_buffering=True, write_through=False)
    try:
        module, _, name = job.target.partition(":")
        target: Any = importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
        target(*job.args)
    except (SystemExit, KeyboardInterrupt):
        raise  # the interpreter knows what to do
    except BaseException as error:
        shown = error.with_traceback(_without_own_frames(error.__traceback__))
        sys.last_type, sys.last_value, sys.last_traceback = type(shown), shown, shown.__traceback__  # as Python does
        sys.excepthook(type(shown), shown, shown.__traceback__)
        sys.exit(1)


def run_script(script: str, arguments: list[str], as_module: bool) -> None:
    """Run a script as ``python script arguments`` does, or ``python -m script arguments``."""
    sys.argv = [script, *arguments]
    put_first(script_folder(script, as_module))
    if as_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
        return
    path = os.path.abspath(script)
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        print(f"can't open file {path!r}: {error}", file=sys.stderr)
        sys.exit(2)
    # Not runpy.run_path: it takes the module away again, while threads and exit handlers of the script still need it.
    main = types.ModuleType("__main__")
    main.__dict__.update(
        __file__=path, __builtins__=builtins, __cached__=None, __loader__=SourceFileLoader("__main__", path)
    )
    sys.modules["__main__"] = main
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)  # noqa: S102 - the user's own script


def _set_environment(job: WorkerJob) -> None:
    """Set the worker's variables, and those that preloaded modules set unless the worker has its own value."""
    wanted = dict(job.env)
    for name, value in job.preloaded_env.items():
        if job.started_env.get(name) != value and wanted.get(name) == job.started_env.get(name):
            wanted[name] = value
    for name in [name for name in os.environ if name not in wanted]:
        del os.environ[name]
    os.environ.update(wanted)


def _refresh_random_numbers(torch_seed: int | None) -> None:
    """Seed NumPy and torch again: they seed themselves at import, so all forks would draw the same numbers. Python's
    ``random`` does so itself at a fork. A seed that a preloaded module set in torch stays, as in a fresh
    interpreter."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.initial_seed() == torch_seed:
        torch.default_generator.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    multiprocessing = sys.modules.get("multiprocessing.process")
    if multiprocessing is not None:
        multiprocessing.current_process().authkey = os.urandom(32)


def _set_threads(job: WorkerJob) -> None:
    """Set torch's number of threads: OpenMP read its environment when torch was loaded."""
    wanted, torch = job.env.get("OMP_NUM_THREADS"), sys.modules.get("torch")
    if torch is not None and wanted and wanted != job.started_env.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(wanted.partition(",")[0]))


def script_folder(script: str, as_module: bool) -> str:
    """Return the folder that Python searches first for modules of a script."""
    return os.getcwd() if as_module else os.path.dirname(os.path.realpath(script))


def put_first(folder: str | None) -> None:
    if folder is not None and not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder


def _without_own_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that begins with the user's script."""
    while traceback is not None and traceback.tb_frame.f_code.co_filename in _OWN_FILES:
        traceback = traceback.tb_next
    return traceback
