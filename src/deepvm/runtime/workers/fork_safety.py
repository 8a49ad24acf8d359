"""Checks before a process forks workers: one thread, and no CUDA.

A lock that another thread holds at the fork stays locked in the child. A started OpenMP pool is missing there, and the
first multi-threaded operation waits for it. A CUDA context does not survive a fork.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Iterable
from pathlib import Path

_TASKS = Path("/proc/self/task")
_DEVICES = ("/dev/nvidia", "/dev/kfd")  # a driver that was asked for a context keeps these open
_SETTLE_S = 0.2  # a thread that was joined is in /proc for a moment longer


def problem() -> str | None:
    """Return why this process must not fork, as the end of a sentence that begins with the cause; None if it may."""
    return _threads() or _cuda(open_files())


def supported() -> str | None:
    """Return why this system can have no template; None if it can."""
    if not _TASKS.is_dir():
        return "threads can only be counted with Linux's /proc"
    return None


def _threads() -> str | None:
    if _other_threads():
        _fork_nothing()
    deadline = time.monotonic() + _SETTLE_S
    while len(others := _other_threads()) and time.monotonic() < deadline:
        time.sleep(0.005)
    if not others:
        return None
    names = ", ".join(sorted(set(others)))
    return f"left {len(others)} more thread{'s' * (len(others) > 1)} running ({names}), which a fork would lose"


def _fork_nothing() -> None:
    """Fork a process that ends at once. Libraries that prepare for forks end their threads for it, as NumPy's OpenBLAS
    does, and restart them when needed. Other threads stay."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python's own, about a fork with threads
        pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def _other_threads() -> list[str]:
    names = []
    for task in _TASKS.iterdir():
        if int(task.name) == os.getpid():
            continue
        try:
            names.append((task / "comm").read_text(encoding="utf-8", errors="replace").strip())
        except OSError:  # it has just ended
            continue
    return names


def _cuda(files: Iterable[str]) -> str | None:
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda.is_initialized():
        return "initialised CUDA, which does not survive a fork"
    device = next((name for name in files if name.startswith(_DEVICES)), None)
    if device is not None:
        return f"opened {device}: a GPU's context does not survive a fork"
    return None


def open_files() -> list[str]:
    names = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            names.append(os.readlink(link))
        except OSError:  # the descriptor of this very listing
            continue
    return names
