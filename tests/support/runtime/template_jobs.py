"""What workers of a template are asked to do in the tests. Each writes what it saw where it is told to."""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path


def describe(path: str, *names: str) -> None:
    imported = "torch" in sys.modules
    import numpy
    import torch

    state = {
        "imported": imported,
        "pid": os.getpid(),
        "ppid": os.getppid(),
        "group": os.getpgrp(),
        "threads": len(os.listdir("/proc/self/task")),
        "cwd": os.getcwd(),
        "env": {name: os.environ.get(name) for name in names},
        "c_env": {name: _getenv(name) for name in names},
        "random": random.random(),
        "numpy": float(numpy.random.rand()),
        "torch": torch.rand(3).tolist(),
        "num_threads": torch.get_num_threads(),
        "sigint": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "files": sorted(int(name) for name in os.listdir("/proc/self/fd")),
    }
    Path(path).write_text(json.dumps(state), encoding="utf-8")


def _getenv(name: str) -> str | None:
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    value = getenv(name.encode())
    return None if value is None else os.fsdecode(value)


def talk() -> None:
    print("out: tables are set")
    print("err: but nobody came", file=sys.stderr)
    print("in:", sys.stdin.readline().strip())


def leave(how: str, path: str = "") -> None:
    if how == "exit":
        sys.exit(3)
    if how == "exit-with-words":
        sys.exit("no more bread")
    if how == "at once":
        os._exit(4)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "interrupted":
        raise KeyboardInterrupt
    if how == "error":
        raise ValueError("the oven is cold")
    if how == "late":
        atexit.register(Path(path).write_text, "at exit")
        threading.Thread(target=lambda: (time.sleep(0.3), Path(path + "-thread").write_text("done"))).start()


def compute() -> None:
    """Needs both of OpenMP's threads; a fork of a process that had them running would hang here."""
    import torch

    torch.set_num_threads(2)
    big = torch.ones(1500, 1500)
    assert bool(((big @ big) == 1500.0).all())


def sleep_with_child(path: str) -> None:
    child = subprocess.Popen(["sleep", "60"])
    Path(path).write_text(f"{os.getpid()} {child.pid}", encoding="utf-8")
    child.wait()


def on_sigterm(path: str) -> None:
    def handler(*_: object) -> None:
        Path(path).write_text("got it", encoding="utf-8")
        sys.exit(7)

    signal.signal(signal.SIGTERM, handler)
    Path(path).write_text("ready", encoding="utf-8")
    time.sleep(60)
