"""Run a group of ranks: a task and a number of workers in, what rank 0 measured out.

Each rank is a process of this machine, pinned to its share of the cores, or of another host (``hosts``). All of them
end with the group, whatever ends it.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import deepvm
from deepvm.calibrate.scaling.hosts import Hosts
from deepvm.errors import DeepvmError, printable

SILENCE_S = 180.0  # without a step; importing torch on a busy machine takes a minute
_LAST_WORDS = 2000  # bytes of a failed rank's error


def cores_of_ranks(workers: int, per_worker: int, cores: Sequence[int]) -> list[list[int]]:
    """Give every rank its cores, in turn: ranks beyond the machine share them."""
    return [[cores[(rank * per_worker + i) % len(cores)] for i in range(per_worker)] for rank in range(workers)]


def run_group(
    task: dict[str, Any],
    *,
    workers: int,
    cores: Sequence[Sequence[int]] | None = None,
    hosts: Hosts | None = None,
    tick: Callable[[], None] = lambda: None,
    silence_s: float = SILENCE_S,
) -> dict[str, Any]:
    """Measure with this many ranks, and return rank 0's answer. DeepvmError if one fails or stays silent."""
    with tempfile.TemporaryDirectory(prefix="deepvm-scaling-") as folder:
        ranks: list[subprocess.Popen[bytes]] = []

        def start(first: int, last: int, meet: Any) -> None:
            for rank in range(first, last):
                own = None if cores is None else sorted(set(cores[rank]))
                about = {**task, "rank": rank, "workers": workers, "cores": own, "meet": meet}
                ranks.append(_start(about, Path(folder), rank, hosts))

        try:
            start(0, workers if hosts is None else 1, f"{folder}/meet" if hosts is None else None)
            answer = _follow(ranks, Path(folder), tick, silence_s, lambda address: start(1, workers, address))
            for process in ranks:
                process.wait(timeout=30)
            return answer
        except subprocess.TimeoutExpired:
            raise DeepvmError("a worker of the calibration did not end within 30 s after its measurement") from None
        finally:
            _end(ranks)


def _start(task: dict[str, Any], folder: Path, rank: int, hosts: Hosts | None) -> subprocess.Popen[bytes]:
    threads = str(len(task["cores"])) if task["cores"] else "1"
    here = str(Path(deepvm.__file__).parents[1])  # ranks run this very package, wherever it was imported from
    path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "PYTHONPATH": path}
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host's name may resolve to nothing
    with open(folder / f"errors-{rank}", "wb") as errors:
        here_words = [sys.executable, "-m", "deepvm.calibrate.scaling.worker", json.dumps(task)]
        return subprocess.Popen(
            here_words if hosts is None else hosts.command(rank, task),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            stderr=errors,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches the calibration, which ends them
        )


def _follow(
    ranks: Sequence[subprocess.Popen[bytes]],
    folder: Path,
    tick: Callable[[], None],
    silence_s: float,
    met: Callable[[Any], None],
) -> dict[str, Any]:
    """Read rank 0's lines until it answers. ``met`` gets the address where other hosts meet it."""
    last = time.monotonic()
    for line in _lines(ranks[0]):
        failed = [rank for rank, process in enumerate(ranks) if process.poll() not in (None, 0)]
        if failed:
            raise DeepvmError(f"worker {failed[0]} of the calibration failed: {_last_words(folder, failed[0])}")
        if line is None:
            if time.monotonic() - last > silence_s:
                raise DeepvmError(f"the workers of the calibration made no step for {silence_s:g} s")
            continue
        last = time.monotonic()
        with contextlib.suppress(ValueError):  # what a library prints
            message = json.loads(line)
            if isinstance(message, dict) and "seconds" in message:
                return message
            if isinstance(message, dict) and "meet" in message:
                met(message["meet"])
            tick()
    raise DeepvmError(f"worker 0 of the calibration ended without an answer: {_last_words(folder, 0)}")


def _lines(process: subprocess.Popen[bytes]) -> Iterator[bytes | None]:
    """Yield lines as they arrive, and None in between, so that the caller can look around. Ends with the output."""
    arrived: queue.Queue[bytes | None] = queue.Queue()

    def read() -> None:
        with contextlib.suppress(ValueError, OSError):  # closed while it was read
            for line in process.stdout or ():
                arrived.put(line)
        arrived.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = arrived.get(timeout=0.2)
        except queue.Empty:
            yield None
            continue
        if line is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)
            yield None
            return
        yield line


def _last_words(folder: Path, rank: int) -> str:
    with contextlib.suppress(OSError):
        text = (folder / f"errors-{rank}").read_bytes()[-_LAST_WORDS:].decode(errors="replace").strip()
        if text:
            return printable(text.splitlines()[-1])[:300]
    return "it printed no error"


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in ranks:
        if process.poll() is None:
            process.kill()
    for process in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
