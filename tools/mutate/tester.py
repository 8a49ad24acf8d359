"""The parent's end of a `test_process`: one scratch copy, one request at a time; and several of them side by side."""

from __future__ import annotations

import functools
import json
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from tools.mutate import scratch


class Tester:
    """Runs tests in a scratch copy of the tree; for one thread."""

    started: ClassVar[list[Tester]] = []

    def __init__(self, folder: Path, *, observed: bool) -> None:
        self.folder = folder
        self.recorder = scratch.make(folder, observed=observed)
        self.observed = observed
        command = [str(folder / "venv/bin/python"), str(folder / "tree/tools/mutate/test_process.py")]
        self._process = subprocess.Popen(
            [*_own_shared_memory(), *command],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder,
            stderr=(folder / "stderr").open("w"), start_new_session=True,
        )  # fmt: skip
        self.started.append(self)

    def run(self, tests: list[str], *, limit_s: float, times: dict[str, float] | None = None) -> dict[str, Any]:
        """Run tests in this order, up to the first failure; an observed run continues after failures."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"tests": tests, "limit_s": limit_s, "times": times or {}, "observe": self.observed}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the test process ended: {(self.folder / 'stderr').read_text()[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def write(self, path: str, text: str) -> None:
        """Replace a source file of the copy, and let no compiled file hide that."""
        file = self.folder / "tree" / path
        file.write_text(text, encoding="utf-8")
        for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
            compiled.unlink()

    def close(self) -> None:
        """End the test process, and all that it started."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @classmethod
    def kill_all(cls) -> None:
        """End every test process now, in the middle of its tests; what they started ends with their pipes or later."""
        for tester in cls.started:
            tester._process.kill()
            tester._process.wait()


@functools.cache
def _own_shared_memory() -> tuple[str, ...]:
    """Return the beginning of a command that gets a /dev/shm of its own, where root may: what a fault leaves there
    would make other tests of this machine fail."""
    words = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$0" "$@"')
    try:
        tried = subprocess.run([*words, "true"], capture_output=True, check=False)
    except FileNotFoundError:
        return ()
    return words if tried.returncode == 0 else ()


def run_side_by_side(serve: Callable[[int], None], jobs: int) -> None:
    """Call ``serve`` with each of the first ``jobs`` numbers, in threads of their own, and wait for all of them."""
    threads = [threading.Thread(target=serve, args=(number,), daemon=True) for number in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
