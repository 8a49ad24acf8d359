"""The process of ``deepvm profile``: a script in, run as it is but observed; a report out, after enough steps.

    python -m deepvm.calibrate.job.observer SETTINGS.json

torch is imported by the script, not by this module: what a script sets before that (threads, visible devices) holds.
What a script saves with torch.save or a Checkpointer goes into the scratch folder, which the caller deletes.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from deepvm.runtime.workers.forked_worker import run_script

MOST_NEW_FILES = 20
TRACKER_S = 3.0  # that multiprocessing's resource tracker has to remove shared memory; it takes milliseconds
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Observer:
    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._scratch = Path(settings["scratch"])
        self._watch: Any = None
        self._ends_s = time.monotonic() + settings["timeout_s"]
        self._progress = os.open(self._scratch / "progress", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._reporting = threading.Lock()
        self._pid = os.getpid()
        self.new_files: list[str] = []

    # --- the script ---------------------------------------------------------------------------------------------

    def run(self) -> int:
        settings = self._settings
        sys.addaudithook(self._audit)
        sys.meta_path.insert(0, _AfterImport("torch", self._watch_torch))
        threading.Thread(target=self._watchdog, daemon=True, name="deepvm-profile").start()
        try:
            run_script(settings["script"], list(settings["args"]), settings["module"])
        except SystemExit as leaving:
            code = leaving.code
            if code not in (None, 0):
                self.report({"outcome": "exited", "code": code if isinstance(code, int) else 1, "said": _text(code)})
                raise
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if type(error).__name__ == "Finished" and type(error).__module__ == "deepvm.calibrate.job.watch":
                return 0
            self.report({"outcome": "crashed", **_about(error, settings["script"])})
            traceback.print_exc()
            return 1
        self.report({"outcome": "ended"})
        return 0

    def report(self, document: Mapping[str, Any]) -> None:
        """Write the report, unless a better one is written: what is done is done, whatever a script does after it."""
        if os.getpid() != self._pid:  # a fork of the script has these hooks, too
            return
        with self._reporting:
            path, rank = self._scratch / "report.json", {"timed": 1, "done": 2}
            with suppress(OSError, ValueError):
                before = json.loads(path.read_text())["outcome"]
                if rank.get(before, 0) > rank.get(document["outcome"], 0):
                    document = {**json.loads(path.read_text()), "then": dict(document)}
            found = {"seen": self._seen(), "new_files": self.new_files[:MOST_NEW_FILES], **document}
            aside = path.with_suffix(".part")
            aside.write_text(json.dumps(found, allow_nan=False))
            aside.replace(path)

    def _seen(self) -> dict[str, Any]:
        torch = sys.modules.get("torch")
        if self._watch is None or torch is None:
            return {"torch": torch is not None, "steps": 0, "text": "torch was not imported"}
        return {
            "torch": True,
            "steps": self._watch.done,
            "text": self._watch.describe(),
            "optimizers": sorted(_optimizers(torch))[:8],
        }

    def _watchdog(self) -> None:
        """At the deadline, report what was seen and where the script is; then end it."""
        time.sleep(max(0.0, self._ends_s - time.monotonic()))
        frames = sys._current_frames().get(threading.main_thread().ident or 0)
        stack = traceback.extract_stack(frames)
        script = os.path.abspath(self._settings["script"])
        at = next((row for row in reversed(stack) if row.filename == script), stack[-1] if stack else None)
        where = "" if at is None else f"{os.path.basename(at.filename)}, line {at.lineno}"
        self.report({"outcome": "timeout", "where": where})
        remove_shared_memory()
        os._exit(1)

    # --- what is observed ---------------------------------------------------------------------------------------

    def _watch_torch(self, torch: Any) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        from deepvm.calibrate.job.watch import Watch, main_thread_waits

        settings = self._settings
        left_s = self._ends_s - time.monotonic()
        watch = self._watch = Watch(
            warmup=settings["warmup"],
            steps=settings["steps"],
            ends_s=time.perf_counter() + left_s,
            report=self.report,
            progress=self._show,
        )
        register_optimizer_step_post_hook(self._in_this_process(watch.optimizer_stepped))
        _time_batches(_BaseDataLoaderIter, main_thread_waits(watch))
        _redirect_files(torch, self._scratch / "files")
        self._watch_checkpointers()

    def _watch_checkpointers(self) -> None:
        """Let Checkpointers save into the scratch folder, and only if the script asks for it by save()."""
        from deepvm.checkpoint.checkpointer import Checkpointer

        kind: Any = Checkpointer
        watch, store = self._watch, f"file://{self._scratch}/store"
        make, step = kind.__init__, kind.step

        @functools.wraps(make)
        def init(this: Any, state: Any, _store: Any = None, **options: Any) -> None:
            options.pop("store", None)
            make(this, state, store, **{**options, "policy": "at notice"})
            watch.checkpointer = this

        @functools.wraps(step)
        def stepped(this: Any, number: int) -> Any:
            handle = step(this, number)
            watch.checkpointer_stepped(this)
            return handle

        kind.__init__, kind.step = init, stepped

    def _in_this_process(self, hook: Any) -> Any:
        def called(*args: Any) -> None:
            if os.getpid() == self._pid:
                hook(*args)

        return called

    def _show(self, steps: int) -> None:
        os.pwrite(self._progress, b"%-20d" % steps, 0)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        """List files and folders that the script creates, but not what is in these folders."""
        if event not in ("open", "os.mkdir") or len(self.new_files) >= MOST_NEW_FILES or os.getpid() != self._pid:
            return
        path, _, flags = args
        writes = event == "os.mkdir" or (isinstance(flags, int) and flags & _WRITES)
        if not isinstance(path, str | bytes | os.PathLike) or not writes:
            return
        with suppress(OSError, ValueError):
            name = os.path.abspath(os.fsdecode(path))
            ours = (f"{self._scratch}{os.sep}", "/dev/", "/proc/", *(f"{known}{os.sep}" for known in self.new_files))
            if not name.startswith(ours) and not os.path.exists(name) and name not in self.new_files:
                self.new_files.append(name)


class _AfterImport(MetaPathFinder):
    """Calls something once a module is imported."""

    def __init__(self, name: str, then: Any) -> None:
        self._name, self._then = name, then

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        del path, target
        if name != self._name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader, self._then)
        return spec


class _Then(Loader):
    def __init__(self, loader: Any, then: Any) -> None:
        self._loader, self._then = loader, then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._then(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _time_batches(iterators: Any, waited: Any) -> None:
    take = iterators.__next__

    @functools.wraps(take)
    def timed(this: Any) -> Any:
        began_s = time.perf_counter()
        batch = take(this)
        waited(time.perf_counter() - began_s)
        return batch

    iterators.__next__ = timed


def _redirect_files(torch: Any, folder: Path) -> None:
    """Let torch.save write into a folder of ours, from which torch.load reads it again."""
    save, load = torch.save, torch.load

    def place(path: Any) -> Path | None:
        if not isinstance(path, str | os.PathLike):
            return None
        return folder / os.path.abspath(os.fspath(path)).replace(os.sep, "|")[-200:]

    @functools.wraps(save)
    def saved(obj: Any, f: Any, *args: Any, **options: Any) -> Any:
        where = place(f)
        if where is not None:
            folder.mkdir(exist_ok=True)
        return save(obj, f if where is None else where, *args, **options)

    @functools.wraps(load)
    def loaded(f: Any, *args: Any, **options: Any) -> Any:
        where = place(f)
        return load(where if where is not None and where.exists() else f, *args, **options)

    torch.save, torch.load = saved, loaded


def _optimizers(torch: Any) -> set[str]:
    import gc

    kinds = {type(one) for one in gc.get_objects()}
    return {kind.__qualname__ for kind in kinds if issubclass(kind, torch.optim.Optimizer)}


def remove_shared_memory() -> None:
    """Let multiprocessing's resource tracker remove the shared memory that the script did not: it does so once its pipe
    is closed, and the end of this process would kill it before that."""
    module = sys.modules.get("multiprocessing.resource_tracker")
    tracker = getattr(module, "_resource_tracker", None)
    pipe, pid = getattr(tracker, "_fd", None), getattr(tracker, "_pid", None)
    if not isinstance(pipe, int) or not isinstance(pid, int):
        return
    with suppress(OSError):
        os.close(pipe)
        ends_s = time.monotonic() + TRACKER_S  # a child of the script may hold the pipe, too
        while os.waitpid(pid, os.WNOHANG) == (0, 0) and time.monotonic() < ends_s:
            time.sleep(0.005)


def _about(error: BaseException, script: str) -> dict[str, Any]:
    rows = traceback.extract_tb(error.__traceback__)
    path = os.path.abspath(script)
    at = next((row for row in reversed(rows) if row.filename == path), rows[-1] if rows else None)
    if isinstance(error, SyntaxError) and error.filename:
        where = f"{os.path.basename(error.filename)}, line {error.lineno}"
    else:
        where = "" if at is None else f"{os.path.basename(at.filename)}, line {at.lineno}"
    lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
    return {"error": _text(lines[-1] if isinstance(error, SyntaxError) else _first_sentence(lines)), "where": where}


def _first_sentence(lines: Sequence[str]) -> str:
    """Return the first line of an error, and the next one if the first announces it."""
    first, rest = lines[0].strip(), [line.strip() for line in lines[1:] if line.strip()]
    return f"{first} {rest[0]}" if first.endswith(":") and rest else first


def _text(value: object) -> str:
    return "" if value is None or isinstance(value, int) else str(value)[:500]


def main() -> int:
    if sys.path[:1] == [os.getcwd()]:  # which -m puts there; the script's own folder takes its place
        del sys.path[0]
    atexit.register(remove_shared_memory)  # the first to be registered runs last, after the script's own
    observer = Observer(json.loads(Path(sys.argv[1]).read_text()))
    return observer.run()


if __name__ == "__main__":
    sys.exit(main())
