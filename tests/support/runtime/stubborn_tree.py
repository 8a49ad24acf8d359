"""Process trees that do not want to end. Started by its file name: ``python -I -S stubborn_tree.py KIND PIDS``.

Every process adds its number to the file PIDS. With ``leave``, the first one ends when its tree is there.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable


def note(what: object) -> None:
    with open(sys.argv[2], "a", encoding="utf-8") as file:
        file.write(f"{what}\n")


def stubborn() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    note(os.getpid())


def stay() -> None:
    while True:
        time.sleep(60)


def daemon(then: Callable[[], None] = stay) -> None:
    """Forked twice, in a session of its own, at home nowhere."""
    if (first := os.fork()) == 0:
        os.setsid()
        if os.fork() == 0:
            os.chdir("/")
            stubborn()
            then()
        os._exit(0)
    os.waitpid(first, 0)


def nameless() -> None:
    """Nothing of the machine's environment is left."""
    os.execve("/bin/sleep", ["sleep", "600"], {})  # noqa: S606


def workers() -> None:
    """As an agent's: nine of them, each in its own session."""
    for _ in range(9):
        if os.fork() == 0:
            os.setsid()
            stubborn()
            stay()


def bomb() -> None:
    """128 processes, each of which goes on forking children that end at once."""
    for _ in range(7):
        os.fork()
    stubborn()
    os.setpgid(0, 0)
    for _ in range(600):
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)
        time.sleep(0.1)


def phoenix() -> None:
    """Four lines of processes: each lives for an instant and leaves a successor."""
    for _ in range(2):
        os.fork()
    while True:
        if os.fork():
            os._exit(0)


def reaper() -> None:
    """Orphans below it come to it, not to whoever holds the machine."""
    import ctypes

    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    daemon()
    stay()


KINDS = {
    "daemon": daemon,
    "nameless": lambda: daemon(nameless),
    "workers": workers,
    "bomb": lambda: daemon(bomb),
    "phoenix": lambda: daemon(phoenix),
    "reaper": lambda: daemon(reaper),
}
EXPECTED = {"daemon": 2, "nameless": 2, "workers": 10, "bomb": 129, "phoenix": 2, "reaper": 3}  # processes

if __name__ == "__main__":
    stubborn()
    KINDS[sys.argv[1]]()
    if sys.argv[3:] == ["leave"]:
        sys.exit(0)
    stay()
